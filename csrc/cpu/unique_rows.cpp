// unique of rows: unique of one 64-bit key per row.
//
// A row of up to 8 bytes is its own key. Longer rows have a hash for a key, and every row is then compared with the one
// it is taken to equal: where two differ after all, which takes rows made for it, sorting decides instead.
#include <atomic>
#include <cstring>
#include <numeric>

#include "../unique.h"
#include "unique_common.h"

namespace tsr {
namespace {

struct Rows {
  const unsigned char* data;
  int64_t count;
  int64_t bytes;  // of one row

  const unsigned char* row(int64_t i) const { return data + i * bytes; }
  bool equal(int64_t i, int64_t j) const { return std::memcmp(row(i), row(j), static_cast<size_t>(bytes)) == 0; }
  bool fit_in_keys() const { return bytes <= static_cast<int64_t>(sizeof(uint64_t)); }

  uint64_t key(int64_t i) const {
    const unsigned char* from = row(i);
    if (fit_in_keys()) return word(from, bytes);
    uint64_t hash = 0;
    int64_t left = bytes;
    for (; left >= 8; left -= 8, from += 8) hash = mixed(hash ^ word(from, 8));
    return left > 0 ? mixed(hash ^ word(from, left)) : hash;
  }

 private:
  static uint64_t word(const unsigned char* from, int64_t bytes) {
    uint64_t value = 0;
    // Rows without elements may have no address, which memcpy refuses.
    if (bytes > 0) std::memcpy(&value, from, static_cast<size_t>(bytes));
    return value;
  }
  // A bijection.
  static uint64_t mixed(uint64_t x) {
    x *= 0x9E3779B97F4A7C15ull;
    return x ^ x >> 32;
  }
};

// Bytes to read that are worth a thread.
constexpr int64_t kBytesPerThread = 1 << 18;

struct UniqueRows {
  Tensor firsts;
  Tensor inverse;
  Tensor counts;
};

// Whether each row equals the first row of its number.
bool are_right(const Rows& rows, const UniqueRows& result) {
  const int64_t* firsts = result.firsts.const_data_ptr<int64_t>();
  const int64_t* inverse = result.inverse.const_data_ptr<int64_t>();
  std::atomic<bool> right{true};
  parallel_for(0, rows.count, kBytesPerThread / rows.bytes + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!rows.equal(i, firsts[inverse[i]])) return right.store(false, std::memory_order_relaxed);
    }
  });
  return right;
}

UniqueRows by_keys(const Tensor& x, const Rows& rows) {
  const Tensor keys = new_empty(x, {rows.count}, ScalarType::Long);
  int64_t* key = keys.mutable_data_ptr<int64_t>();
  parallel_for(0, rows.count, kBytesPerThread / std::max<int64_t>(rows.bytes, 8) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) key[i] = static_cast<int64_t>(rows.key(i));
  });
  auto [values, inverse, counts] = unique_with_counts_cpu(keys);
  // The keys' own memory is no longer needed, but a result may not hold on to N elements for U.
  const Tensor firsts = new_empty(x, {counts.size(0)}, ScalarType::Long);
  int64_t* first = firsts.mutable_data_ptr<int64_t>();
  const int64_t* number = inverse.const_data_ptr<int64_t>();
  for (int64_t i = 0, next = 0; i < rows.count; ++i) {
    if (number[i] == next) first[next++] = i;
  }
  return {firsts, inverse, counts};
}

UniqueRows by_sorting(const Tensor& x, const Rows& rows) {
  Scratch<int64_t> order(rows.count), equal_first(rows.count);
  std::iota(order.data(), order.data() + rows.count, int64_t{0});
  std::sort(order.data(), order.data() + rows.count, [&](int64_t i, int64_t j) {
    const int compared = std::memcmp(rows.row(i), rows.row(j), static_cast<size_t>(rows.bytes));
    return compared != 0 ? compared < 0 : i < j;
  });
  int64_t distinct = 0;
  for (int64_t k = 0, head = 0; k < rows.count; ++k) {
    if (k == 0 || !rows.equal(order.data()[k], order.data()[head])) {
      head = k;
      ++distinct;
    }
    equal_first.data()[order.data()[k]] = order.data()[head];
  }
  UniqueRows result{new_empty(x, {distinct}, ScalarType::Long), new_empty(x, {rows.count}, ScalarType::Long),
                    new_empty(x, {distinct}, ScalarType::Long)};
  int64_t* firsts = result.firsts.mutable_data_ptr<int64_t>();
  int64_t* inverse = result.inverse.mutable_data_ptr<int64_t>();
  int64_t* counts = result.counts.mutable_data_ptr<int64_t>();
  for (int64_t i = 0, next = 0; i < rows.count; ++i) {
    const int64_t first = equal_first.data()[i];
    if (first == i) {
      firsts[next] = i;
      counts[next] = 0;
      inverse[i] = next++;
    } else {
      inverse[i] = inverse[first];
    }
    ++counts[inverse[i]];
  }
  return result;
}

std::tuple<Tensor, Tensor, Tensor> unique_rows_cpu(const Tensor& given) {
  check_unique_rows(given);
  const Tensor x = as_contiguous(given);
  const Rows rows{static_cast<const unsigned char*>(x.const_data_ptr()), x.size(0),
                  row_elements(x) * static_cast<int64_t>(x.element_size())};
  UniqueRows result = by_keys(x, rows);
  if (!rows.fit_in_keys() && !are_right(rows, result)) result = by_sorting(x, rows);
  return {result.firsts, result.inverse, result.counts};
}

}  // namespace
}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) { TSR_IMPL(m, "unique_rows", &tsr::unique_rows_cpu); }
