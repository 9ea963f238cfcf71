// CPU door of encode_examples. A pass measures the values of every feature of every row, from which the place of each
// in the result follows, and a second one writes them: by feature, so that one row that holds a whole batch is written
// by all threads as well.
#include "record_lists.h"

namespace tsr {
namespace {

constexpr const char* kOp = "encode_examples";
// What protobuf can read.
constexpr int64_t kMostBytes = INT32_MAX;

struct SourceColumn {
  Span name;
  ExampleDtype dtype;
  int64_t size;
  const uint8_t* values;
  const int64_t* string_offsets;
  const int64_t* row_offsets;
  const uint8_t* present;

  bool has(int64_t r) const { return present == nullptr || present[r] != 0; }
  int64_t first(int64_t r) const { return row_offsets == nullptr ? r * size : row_offsets[r]; }
  int64_t integer(int64_t i) const {
    return dtype == ExampleDtype::kInt64 ? load<int64_t>(values + 8 * i) : load<int32_t>(values + 4 * i);
  }
};

// ---- Sizes ----------------------------------------------------------------------------------------------------------

int64_t varint_size(uint64_t value) { return (70 - __builtin_clzll(value | 1)) / 7; }

// A field of bytes, of a number below 16.
int64_t field_size(int64_t bytes) { return 1 + varint_size(static_cast<uint64_t>(bytes)) + bytes; }

// The bytes of a row's values: numbers packed, strings each as a field.
int64_t values_size(const SourceColumn& column, int64_t r) {
  const int64_t begin = column.first(r), end = column.first(r + 1);
  int64_t size = 0;
  switch (column.dtype) {
    case ExampleDtype::kFloat32:
      return 4 * (end - begin);
    case ExampleDtype::kBytes:
      for (int64_t i = begin; i < end; ++i) size += field_size(column.string_offsets[i + 1] - column.string_offsets[i]);
      return size;
    default:
      for (int64_t i = begin; i < end; ++i) size += varint_size(static_cast<uint64_t>(column.integer(i)));
      return size;
  }
}

// The messages around the values, from the innermost to the outermost.
struct EntrySizes {
  int64_t values, list, feature, entry;

  EntrySizes(const SourceColumn& column, int64_t values_)
      : values(values_),
        list(column.dtype == ExampleDtype::kBytes || values == 0 ? values : field_size(values)),
        feature(field_size(list)),
        entry(field_size(column.name.size()) + field_size(feature)) {}
};

// ---- Writing --------------------------------------------------------------------------------------------------------

uint8_t* write_varint(uint8_t* to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) *to++ = static_cast<uint8_t>(value | 0x80);
  *to++ = static_cast<uint8_t>(value);
  return to;
}

uint8_t* write_length(uint8_t* to, uint32_t field, int64_t bytes) {
  *to++ = static_cast<uint8_t>(tag_of(field, kBytesType));
  return write_varint(to, static_cast<uint64_t>(bytes));
}

uint8_t* write_bytes(uint8_t* to, const void* bytes, int64_t size) {
  if (size > 0) std::memcpy(to, bytes, static_cast<size_t>(size));
  return to + size;
}

uint8_t* write_values(uint8_t* to, const SourceColumn& column, int64_t r) {
  const int64_t begin = column.first(r), end = column.first(r + 1);
  switch (column.dtype) {
    case ExampleDtype::kFloat32:
      return write_bytes(to, column.values + 4 * begin, 4 * (end - begin));
    case ExampleDtype::kBytes:
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = column.string_offsets[i], size = column.string_offsets[i + 1] - at;
        to = write_bytes(write_length(to, 1, size), column.values + at, size);
      }
      return to;
    default:
      for (int64_t i = begin; i < end; ++i) to = write_varint(to, static_cast<uint64_t>(column.integer(i)));
      return to;
  }
}

uint8_t* write_entry(uint8_t* to, const SourceColumn& column, int64_t r, const EntrySizes& sizes) {
  to = write_length(to, 1, sizes.entry);
  to = write_bytes(write_length(to, 1, column.name.size()), column.name.begin, column.name.size());
  to = write_length(to, 2, sizes.feature);
  to = write_length(to, list_field(column.dtype), sizes.list);
  if (column.dtype != ExampleDtype::kBytes && sizes.values > 0) to = write_length(to, 1, sizes.values);
  return write_values(to, column, r);
}

// ---- All rows -------------------------------------------------------------------------------------------------------

class Encoder {
 public:
  Encoder(std::vector<SourceColumn> columns, int64_t rows, int64_t values)
      : columns_(std::move(columns)),
        rows_(rows),
        values_(rows * count(), {kOp, "rows", rows}),
        features_(rows, {kOp, "rows", rows}) {
    // Small features share a thread, large ones have one each.
    const int64_t average = values / std::max<int64_t>(rows * count(), 1) + 1;
    grain_ = std::max<int64_t>(kWorkPerThread / (8 * average), 1);
  }

  // Where each row begins, and where the last ends.
  void measure(int64_t* offsets) {
    parallel_for(0, rows_ * count(), grain_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const SourceColumn& column = columns_[static_cast<size_t>(i % count())];
        values_[i] = column.has(i / count()) ? values_size(column, i / count()) : kAbsent;
      }
    });
    offsets[0] = 0;
    for (int64_t r = 0; r < rows_; ++r) {
      features_[r] = 0;
      for (int64_t c = 0; c < count(); ++c) features_[r] += entry_field(r, c);
      const int64_t size = features_[r] > 0 ? field_size(features_[r]) : 0;
      TSR_CHECK_VALUE(size <= kMostBytes, kOp, ": row ", r, " takes ", size, " bytes, and no message has more than ",
                      kMostBytes);
      offsets[r + 1] = offsets[r] + size;
    }
  }

  void write(uint8_t* out, const int64_t* offsets) const {
    parallel_for(0, rows_ * count(), grain_, [&](int64_t begin, int64_t end) {
      uint8_t* to = nullptr;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = i / count(), c = i % count();
        if (i == begin || c == 0) to = place(out + offsets[r], r, c);
        if (values_[i] == kAbsent) continue;
        const SourceColumn& column = columns_[static_cast<size_t>(c)];
        to = write_entry(to, column, r, EntrySizes(column, values_[i]));
      }
    });
  }

 private:
  static constexpr int64_t kAbsent = -1;

  int64_t count() const { return static_cast<int64_t>(columns_.size()); }

  // The bytes of a row's feature in the map: 0 if it is absent.
  int64_t entry_field(int64_t r, int64_t c) const {
    const int64_t values = values_[r * count() + c];
    return values == kAbsent ? 0 : field_size(EntrySizes(columns_[static_cast<size_t>(c)], values).entry);
  }

  // Where column c's feature of row r goes; the row's first writes what is before all of them.
  uint8_t* place(uint8_t* row, int64_t r, int64_t c) const {
    if (features_[r] == 0) return row;
    if (c == 0) return write_length(row, 1, features_[r]);
    uint8_t* at = row + 1 + varint_size(static_cast<uint64_t>(features_[r]));
    for (int64_t before = 0; before < c; ++before) at += entry_field(r, before);
    return at;
  }

  std::vector<SourceColumn> columns_;
  int64_t rows_;
  Buffer<int64_t> values_;    // [rows, columns]: bytes of the values, or kAbsent
  Buffer<int64_t> features_;  // [rows]: bytes of the map
  int64_t grain_ = 1;
};

// ---- Columns --------------------------------------------------------------------------------------------------------

// Checks a column's values, and the offsets of its strings. Returns the number of its strings, or of its numbers.
int64_t checked_values(const std::string& at, ExampleDtype dtype, const Tensor& values, const Tensor& strings) {
  check_vector(kOp, at + " values", values, scalar_type_of(dtype), -1);
  if (dtype != ExampleDtype::kBytes) {
    check_vector(kOp, at + " string offsets", strings, ScalarType::Long, 0);
    return values.size(0);
  }
  check_offsets(kOp, at + " string offsets", strings, values.size(0));
  return strings.size(0) - 1;
}

// Checks the column whose four tensors begin at columns[first], which must be contiguous.
SourceColumn checked_column(const std::vector<Tensor>& columns, size_t first, Span name, int64_t dtype, int64_t size,
                            int64_t rows) {
  const Tensor &values = columns[first], &strings = columns[first + 1], &bounds = columns[first + 2],
               &present = columns[first + 3];
  const std::string at = message("feature '", std::string(name.begin, name.end), "'");
  const ExampleDtype kind = static_cast<ExampleDtype>(dtype);
  const int64_t count = checked_values(at, kind, values, strings);
  if (size == kAnyNumber) {
    check_vector(kOp, at + " row offsets", bounds, ScalarType::Long, rows + 1);
    check_offsets(kOp, at + " row offsets", bounds, count);
    const int64_t* const ends = bounds.const_data_ptr<int64_t>();
    TSR_CHECK_VALUE(ends[0] == 0 && ends[rows] == count, kOp, ": ", at, " row offsets must go from 0 to ", count,
                    ", the number of values, got ", ends[0], " to ", ends[rows]);
  } else {
    check_vector(kOp, at + " row offsets", bounds, ScalarType::Long, 0);
    TSR_CHECK_VALUE(size == 0 ? count == 0 : count % size == 0 && count / size == rows, kOp, ": ", at, " must have ",
                    size, " values for each of the ", rows, " rows, got ", count);
  }
  check_vector(kOp, at + " present", present, ScalarType::Byte, present.numel() == 0 ? 0 : rows);
  const auto offsets = [](const Tensor& x) { return x.numel() == 0 ? nullptr : x.const_data_ptr<int64_t>(); };
  return {name,
          kind,
          size,
          static_cast<const uint8_t*>(values.data_ptr()),
          offsets(strings),
          offsets(bounds),
          present.numel() == 0 ? nullptr : present.const_data_ptr<uint8_t>()};
}

}  // namespace

std::tuple<Tensor, Tensor> encode_examples_cpu(const Tensor& name_bytes, const Tensor& name_offsets,
                                               const std::vector<int64_t>& dtypes, const std::vector<int64_t>& sizes,
                                               const std::vector<Tensor>& columns, int64_t rows) {
  const FeatureNames names = checked_names(kOp, name_bytes, name_offsets);
  check_columns(kOp, names, dtypes, sizes);
  TSR_CHECK_VALUE(rows >= 0 && rows < INT64_MAX, kOp, ": rows must be in [0, 2^63 - 1), got ", rows);
  TSR_CHECK_VALUE(columns.size() == kTensorsPerColumn * dtypes.size(), kOp, ": columns must have ",
                  kTensorsPerColumn * dtypes.size(), " tensors, four for each name, got ", columns.size());
  std::vector<Tensor> dense;
  for (const Tensor& x : columns) dense.push_back(as_contiguous(x));
  std::vector<SourceColumn> sources;
  int64_t values = 0;
  for (size_t c = 0; c < dtypes.size(); ++c) {
    const int64_t i = static_cast<int64_t>(c);
    const Span name{names.data(i), names.data(i) + names.size(i)};
    sources.push_back(checked_column(dense, kTensorsPerColumn * c, name, dtypes[c], sizes[c], rows));
    values += dense[kTensorsPerColumn * c].numel();
  }
  Tensor offsets = new_empty(name_bytes, {rows + 1}, ScalarType::Long, {kOp, "rows", rows});
  int64_t* const at = offsets.mutable_data_ptr<int64_t>();
  Encoder encoder(std::move(sources), rows, values);
  encoder.measure(at);
  Tensor out = new_empty(name_bytes, {at[rows]}, ScalarType::Byte);
  encoder.write(out.mutable_data_ptr<uint8_t>(), at);
  return {out, offsets};
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) { TSR_IMPL(m, "encode_examples", &tsr::encode_examples_cpu); }
