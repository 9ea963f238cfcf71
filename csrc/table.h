// table: keys of any range to the rows of a table that grows: open addressing, in tensors.
//
// A table's state:
//   index     [B, 16] int32: B buckets of one cache line. Words 0 to 2: 12 tags of a byte (0: the slot is empty, and
//             its row is 0); word 3: how many keys passed by because the bucket was full; words 4 to 15: 12 rows. With
//             a seed [(B + 1) * 16]: the buckets, and a line whose first six words are the seed and the two numbers
//             that its hash multiplies with, 64 bits each.
//   entries   [R, 2] int64: of each row its key, and version * 2^32 + frequency. Of a free row: 0 or -1, and -1.
//   counters  [8] int64. kUsed: rows [0, used) have been given out at least once; kReused: how many of free_rows have
//             been given out again; kFailed: positions whose key found no room, ever; kInserted: keys inserted, ever;
//             the rest is the caller's.
//   free_rows [F] int32: rows below `used` that are free, ascending.
// Rows are taken from free_rows first, then from `used` on. A row stays where it is until its key is erased: only
// buckets are made anew when a table grows. All bits of a key are legal: tags, not keys, say which slots are empty.
//
// A key's home is a bucket of its hash's region, of at most 64 buckets (the last of up to 127); where that is full, the
// next ones of the region follow, round and round. So a region is all that one thread needs to insert: any number of
// threads make the same index, and so does CUDA. Keys of one region are inserted in the order of their positions.
//
// Without a seed all tables have one hash, and who has read it can choose keys that fill a region. A seed chooses the
// factors of the hash: of any two keys, about 2 of as many factors as there are regions send both to one region
// (Dietzfelbinger et al., "A reliable randomized algorithm for the closest-pair problem", 1997). Nothing but the index
// depends on it where no region is full.
//
// table_find(index, entries, ids [N]) -> rows [N] int64: -1 where a key is missing.
// table_find_or_insert_(index!, entries!, counters!, free_rows, ids [N], allowed [N]?, frequencies [N]?, version,
//     count) -> (rows [N], born [N]), int64:
//   finds every key, and inserts those that are missing and allowed (bool, true takes part; none: all are) at any of
//   their positions, in the order of the first such position: the k-th new key gets the k-th row that is free. rows[i]
//   is -1 where a key is missing and inserted at no position, or where there was no room; such a key leaves no trace
//   but in kFailed. born[i] is the inserted row at the position that inserted its key, else -1.
//   version >= 0: becomes the version of all rows found or inserted; -1: rows keep theirs, and new ones have 0.
//   count: each occurrence adds one to its row's frequency, up to 2^31 - 1; a new row with frequencies (int32; below 0
//   counts as 0) starts with that of the position that inserted it instead.
// tables_find_or_insert_(index![], entries![], counters![], free_rows[], ids [N], begins[], ends[], versions[], count)
//     -> (rows [N], born [N]): table_find_or_insert_ of K tables at once, table k for ids[begins[k] : ends[k]], with
//   versions[k]; all keys are allowed. Elsewhere rows has the ids and born -1. No two tables may be one, nor parts of
//   ids overlap.
// table_erase_(index!, entries!, ids [N], mask [N]?) -> rows [N] int64: the rows that have become free; -1 where the
//   key is missing, masked out (bool, true takes part) or erased at an earlier position.
// table_rehash(entries, counters!, buckets, seed) -> index: a new index of all keys, in the order of their rows. Keys
//   that find no room are counted in kFailed. seed 0: it has none.
// table_initialize_(weight! [R, D], rows [M], keys [M], values [P, D]?, kind, parameters, seed) -> (): the initial
//   value of each row, a function of (seed, key, column) alone: kConstant (value), kUniform (low, high), kNormal (mean,
//   std), kTruncatedNormal (mean, std; within two std), by the inverse of the distribution function, whose relative
//   error is below 1.15e-9. With values: row key mod P of them. Negative rows are left out. Rows occur once.
// table_lookup(index, entries, weight, ids [N], missing [D]?, values [P, D]?, kind, parameters, seed) -> [N, D]: find
//   and read in one pass; a missing key has the row `missing`, without that its initial value.
// table_assign_(weight! [R, D], rows [M], values [M, D]) -> (): weight[rows[i]] = values[i]; of several the last.
//   Negative rows are left out.
// count_min_sketch_(sketch! [W], ids [N], mask [N]?, num_hashes, count) -> counts [N] int32: adds one to num_hashes
//   counters of each id that is not masked out (count false: adds nothing), to one of them twice where two coincide;
//   then reads their least, up to 2^31 - 1; 0 where masked out. Counters (int8 to int64) stay at their largest value.
//   This is the counting Bloom filter.
//
// * ids: int32 or int64; weight: any float dtype, computed in float64 and rounded once; or uint8, for table_assign_ and
//   table_lookup with `missing`: rows of bytes.
// * What is written shares no memory with anything else of the call: ValueError.
// * Rows beyond the weight: IndexError. State that cannot be a table's: ValueError, or rows that mean nothing, but no
//   access outside of the tensors.
// * Deterministic: state and results are functions of state and arguments, on both devices the same bits.
// * Nothing is differentiable. N == 0 and D == 0 are legal. All state must be contiguous; B >= 1, R < 2^31.
// * On CUDA nothing waits for the device.
// * Memory per key beyond its row, at load 0.75 (9 of 12 slots): 64 / 9 + 16 = 23.1 bytes.
// Source: TensorFlow's MutableHashTable and DenseHashTable; DeepRec's EmbeddingVariable.
#pragma once
#include "abi.h"
#include "dispatch.h"
#include "shared_memory.h"
#include "table_initial.h"
#include "table_layout.h"

namespace tsr {

// ---- Checks ---------------------------------------------------------------------------------------------------------

inline void check_table_ids(const char* op, const Tensor& ids, const char* argument = "ids") {
  TSR_CHECK_VALUE(ids.dim() == 1, op, ": ", argument, " must have rank 1, got shape ", shape_text(ids));
  dispatch_index(ids.scalar_type(), op, argument, [](auto) {});
}

inline void check_table_entries(const char* op, const Tensor& entries) {
  TSR_CHECK_VALUE(entries.dim() == 2 && entries.size(1) == 2 && entries.size(0) <= INT32_MAX &&
                      entries.scalar_type() == ScalarType::Long && entries.is_contiguous(),
                  op, ": entries must be contiguous int64 [rows, 2], rows below 2^31, got ",
                  dtype_name(entries.scalar_type()), " ", shape_text(entries));
}

inline void check_table(const char* op, const Tensor& index, const Tensor& entries) {
  const bool is_index =
      index.dim() == 2 ? index.size(0) >= 1 && index.size(1) == kBucketWords
                       : index.dim() == 1 && index.size(0) >= 2 * kBucketWords && index.size(0) % kBucketWords == 0;
  TSR_CHECK_VALUE(is_index && index.scalar_type() == ScalarType::Int && index.is_contiguous(), op,
                  ": index must be contiguous int32 [buckets, 16], or with a seed [(buckets + 1) * 16], got ",
                  dtype_name(index.scalar_type()), " ", shape_text(index));
  check_table_entries(op, entries);
  check_same_device(op, "entries", entries, "index", index);
}

inline void check_table_counters(const char* op, const Tensor& counters, const Tensor& entries) {
  TSR_CHECK_VALUE(counters.dim() == 1 && counters.size(0) == kTableCounters &&
                      counters.scalar_type() == ScalarType::Long && counters.is_contiguous(),
                  op, ": counters must be contiguous int64 [8], got ", dtype_name(counters.scalar_type()), " ",
                  shape_text(counters));
  check_same_device(op, "counters", counters, "entries", entries);
}

inline void check_of_each_id(const char* op, const char* argument, const std::optional<Tensor>& x, const Tensor& ids,
                             ScalarType dtype) {
  if (!x) return;
  TSR_CHECK_VALUE(x->dim() == 1 && x->size(0) == ids.size(0) && x->scalar_type() == dtype, op, ": ", argument,
                  " must be ", dtype_name(dtype), " [", ids.size(0), "], one for each id, got ",
                  dtype_name(x->scalar_type()), " ", shape_text(*x));
  check_same_device(op, argument, *x, "ids", ids);
}

inline void check_table_find(const char* op, const Tensor& index, const Tensor& entries, const Tensor& ids,
                             const std::optional<Tensor>& mask = std::nullopt) {
  check_table(op, index, entries);
  check_table_ids(op, ids);
  check_same_device(op, "ids", ids, "index", index);
  check_of_each_id(op, "mask", mask, ids, ScalarType::Bool);
}

inline void check_table_erase(const Tensor& index, const Tensor& entries, const Tensor& ids,
                              const std::optional<Tensor>& mask) {
  const char* op = "table_erase_";
  check_table_find(op, index, entries, ids, mask);
  CallMemory memory;
  memory.add_written(Place{"index"}, index);
  memory.add_written(Place{"entries"}, entries);
  memory.add_read(Place{"ids"}, ids);
  memory.add_read(Place{"mask"}, mask);
  memory.check(op);
}

inline void check_table_rehash(const Tensor& entries, const Tensor& counters, int64_t buckets) {
  const char* op = "table_rehash";
  TSR_CHECK_VALUE(buckets >= 1 && buckets < (int64_t{1} << 40), op, ": buckets must be in [1, 2^40), got ", buckets);
  check_table_entries(op, entries);
  check_table_counters(op, counters, entries);
  CallMemory memory;
  memory.add_read(Place{"entries"}, entries);
  memory.add_written(Place{"counters"}, counters);
  memory.check(op);
}

// Checks all but one thing: that the tensors share no memory.
inline void check_table_insert(const char* op, const Tensor& index, const Tensor& entries, const Tensor& counters,
                               const Tensor& free_rows, const Tensor& ids, const std::optional<Tensor>& allowed,
                               const std::optional<Tensor>& frequencies, int64_t version) {
  check_table_find(op, index, entries, ids);
  check_table_counters(op, counters, entries);
  TSR_CHECK_VALUE(free_rows.dim() == 1 && free_rows.scalar_type() == ScalarType::Int && free_rows.is_contiguous(), op,
                  ": free_rows must be contiguous int32 of rank 1, got ", dtype_name(free_rows.scalar_type()), " ",
                  shape_text(free_rows));
  check_same_device(op, "free_rows", free_rows, "index", index);
  TSR_CHECK_VALUE(ids.size(0) <= INT32_MAX, op, ": ids must be fewer than 2^31, got ", ids.size(0));
  check_of_each_id(op, "allowed", allowed, ids, ScalarType::Bool);
  check_of_each_id(op, "frequencies", frequencies, ids, ScalarType::Int);
  TSR_CHECK_VALUE(version >= -1 && version <= INT32_MAX, op, ": version must be in [-1, 2^31), got ", version);
}

inline void check_table_insert(const Tensor& index, const Tensor& entries, const Tensor& counters,
                               const Tensor& free_rows, const Tensor& ids, const std::optional<Tensor>& allowed,
                               const std::optional<Tensor>& frequencies, int64_t version) {
  const char* op = "table_find_or_insert_";
  check_table_insert(op, index, entries, counters, free_rows, ids, allowed, frequencies, version);
  CallMemory memory;
  memory.add_written(Place{"index"}, index);
  memory.add_written(Place{"entries"}, entries);
  memory.add_written(Place{"counters"}, counters);
  memory.add_read(Place{"free_rows"}, free_rows);
  memory.add_read(Place{"ids"}, ids);
  memory.add_read(Place{"allowed"}, allowed);
  memory.add_read(Place{"frequencies"}, frequencies);
  memory.check(op);
}

inline void check_tables_insert(const std::vector<Tensor>& index, const std::vector<Tensor>& entries,
                                const std::vector<Tensor>& counters, const std::vector<Tensor>& free_rows,
                                const Tensor& ids, const std::vector<int64_t>& begins, const std::vector<int64_t>& ends,
                                const std::vector<int64_t>& versions) {
  const char* op = "tables_find_or_insert_";
  check_table_ids(op, ids);
  const size_t tables = index.size();
  for (const size_t size :
       {entries.size(), counters.size(), free_rows.size(), begins.size(), ends.size(), versions.size()}) {
    TSR_CHECK_VALUE(size == tables, op, ": all lists must be as long as index, ", tables, ", got ", size);
  }
  int64_t last = 0;
  for (size_t k = 0; k < tables; ++k) {
    TSR_CHECK_VALUE(begins[k] >= last && ends[k] >= begins[k] && ends[k] <= ids.size(0), op, ": begins[", k,
                    "] and ends[", k, "] must be a part of ids, ", ids.size(0), " long, after the one before, got ",
                    begins[k], " and ", ends[k]);
    last = ends[k];
    check_table_insert(op, index[k], entries[k], counters[k], free_rows[k], ids, std::nullopt, std::nullopt,
                       versions[k]);
  }
  CallMemory memory;
  memory.add_written("index", index);
  memory.add_written("entries", entries);
  memory.add_written("counters", counters);
  memory.add_read("free_rows", free_rows);
  memory.add_read(Place{"ids"}, ids);
  memory.check(op);
}

inline void check_rows_of(const char* op, const Tensor& weight, bool bytes) {
  TSR_CHECK_VALUE(weight.dim() == 2 && weight.is_contiguous(), op, ": weight must be contiguous, of rank 2, got shape ",
                  shape_text(weight));
  if (!(bytes && weight.scalar_type() == ScalarType::Byte)) {
    dispatch_float(weight.scalar_type(), op, "weight", [](auto) {});
  }
}

inline Initial check_initial(const char* op, const Tensor& weight, const std::optional<Tensor>& values, int64_t kind,
                             const std::vector<double>& parameters, int64_t seed) {
  if (values) {
    TSR_CHECK_VALUE(values->dim() == 2 && values->size(0) >= 1 && values->size(1) == weight.size(1) &&
                        values->scalar_type() == weight.scalar_type(),
                    op, ": values must be ", dtype_name(weight.scalar_type()), " [rows, ", weight.size(1), "], got ",
                    dtype_name(values->scalar_type()), " ", shape_text(*values));
    check_same_device(op, "values", *values, "weight", weight);
  }
  TSR_CHECK_VALUE(kind >= 0 && kind < kInitialKinds, op, ": kind must be in [0, ", int64_t{kInitialKinds}, "), got ",
                  kind);
  const size_t wanted = kind == kConstant ? 1 : 2;
  TSR_CHECK_VALUE(parameters.size() == wanted, op, ": parameters must be ", wanted, " numbers for kind ", kind,
                  ", got ", parameters.size());
  return {kind, parameters[0], wanted == 2 ? parameters[1] : 0.0, static_cast<uint64_t>(seed)};
}

inline Initial check_table_initialize(const Tensor& weight, const Tensor& rows, const Tensor& keys,
                                      const std::optional<Tensor>& values, int64_t kind,
                                      const std::vector<double>& parameters, int64_t seed) {
  const char* op = "table_initialize_";
  check_rows_of(op, weight, false);
  TSR_CHECK_VALUE(rows.dim() == 1 && rows.scalar_type() == ScalarType::Long, op, ": rows must be int64 of rank 1, got ",
                  dtype_name(rows.scalar_type()), " ", shape_text(rows));
  check_table_ids(op, keys, "keys");
  TSR_CHECK_VALUE(keys.size(0) == rows.size(0), op, ": keys must be as many as rows, ", rows.size(0), ", got ",
                  keys.size(0));
  check_same_device(op, "rows", rows, "weight", weight);
  check_same_device(op, "keys", keys, "weight", weight);
  const Initial initial = check_initial(op, weight, values, kind, parameters, seed);
  CallMemory memory;
  memory.add_written(Place{"weight"}, weight);
  memory.add_read(Place{"rows"}, rows);
  memory.add_read(Place{"keys"}, keys);
  memory.add_read(Place{"values"}, values);
  memory.check(op);
  return initial;
}

inline Initial check_table_lookup(const Tensor& index, const Tensor& entries, const Tensor& weight, const Tensor& ids,
                                  const std::optional<Tensor>& missing, const std::optional<Tensor>& values,
                                  int64_t kind, const std::vector<double>& parameters, int64_t seed) {
  const char* op = "table_lookup";
  check_table_find(op, index, entries, ids);
  check_rows_of(op, weight, missing.has_value());
  TSR_CHECK_VALUE(weight.size(0) == entries.size(0), op, ": weight must have a row for each of entries, ",
                  entries.size(0), ", got ", weight.size(0));
  check_same_device(op, "weight", weight, "index", index);
  if (missing) {
    TSR_CHECK_VALUE(
        missing->dim() == 1 && missing->size(0) == weight.size(1) && missing->scalar_type() == weight.scalar_type(), op,
        ": missing must be ", dtype_name(weight.scalar_type()), " [", weight.size(1), "], got ",
        dtype_name(missing->scalar_type()), " ", shape_text(*missing));
    check_same_device(op, "missing", *missing, "weight", weight);
  }
  return check_initial(op, weight, values, kind, parameters, seed);
}

inline void check_table_assign(const Tensor& weight, const Tensor& rows, const Tensor& values) {
  const char* op = "table_assign_";
  check_rows_of(op, weight, true);
  TSR_CHECK_VALUE(rows.dim() == 1 && rows.scalar_type() == ScalarType::Long, op, ": rows must be int64 of rank 1, got ",
                  dtype_name(rows.scalar_type()), " ", shape_text(rows));
  TSR_CHECK_VALUE(values.dim() == 2 && values.size(0) == rows.size(0) && values.size(1) == weight.size(1) &&
                      values.scalar_type() == weight.scalar_type(),
                  op, ": values must be ", dtype_name(weight.scalar_type()), " [", rows.size(0), ", ", weight.size(1),
                  "], got ", dtype_name(values.scalar_type()), " ", shape_text(values));
  check_same_device(op, "rows", rows, "weight", weight);
  check_same_device(op, "values", values, "weight", weight);
  CallMemory memory;
  memory.add_written(Place{"weight"}, weight);
  memory.add_read(Place{"rows"}, rows);
  memory.add_read(Place{"values"}, values);
  memory.check(op);
}

template <class F>
decltype(auto) dispatch_counter(const Tensor& sketch, F&& f) {
  const char* op = "count_min_sketch_";
  switch (sketch.scalar_type()) {
    case ScalarType::Char:
      return f(type_tag<int8_t>{});
    case ScalarType::Short:
      return f(type_tag<int16_t>{});
    case ScalarType::Int:
      return f(type_tag<int32_t>{});
    case ScalarType::Long:
      return f(type_tag<int64_t>{});
    default:
      throw std::invalid_argument(
          message(op, ": sketch must be int8, int16, int32 or int64, got ", dtype_name(sketch.scalar_type())));
  }
}

// The counters of an id are (first + k * step) mod W for k < num_hashes.
struct SketchPlace {
  uint64_t first, step;

  TSR_HOST_DEVICE SketchPlace(int64_t key)
      : first(hash_key(key)), step(hash_key(static_cast<int64_t>(first ^ 0x9E3779B97F4A7C15ull)) | 1) {}
  TSR_HOST_DEVICE int64_t counter(int64_t k, int64_t width) const {
    return static_cast<int64_t>(multiply_high(first + static_cast<uint64_t>(k) * step, static_cast<uint64_t>(width)));
  }
};

inline void check_count_min_sketch(const Tensor& sketch, const Tensor& ids, const std::optional<Tensor>& mask,
                                   int64_t num_hashes) {
  const char* op = "count_min_sketch_";
  TSR_CHECK_VALUE(sketch.dim() == 1 && sketch.size(0) >= 1 && sketch.is_contiguous(), op,
                  ": sketch must be contiguous, of rank 1 and not empty, got shape ", shape_text(sketch));
  dispatch_counter(sketch, [](auto) {});
  check_table_ids(op, ids);
  check_same_device(op, "ids", ids, "sketch", sketch);
  check_of_each_id(op, "mask", mask, ids, ScalarType::Bool);
  TSR_CHECK_VALUE(num_hashes >= 1 && num_hashes <= 64, op, ": num_hashes must be in [1, 64], got ", num_hashes);
  CallMemory memory;
  memory.add_written(Place{"sketch"}, sketch);
  memory.add_read(Place{"ids"}, ids);
  memory.add_read(Place{"mask"}, mask);
  memory.check(op);
}

}  // namespace tsr
