// record: messages of the type tf.train.Example, between bytes and columns. CPU only.
//
// An Example is a map from features' names to values: a list of byte strings, of floats or of int64.
//
// parse_examples(bytes uint8 [M], ranges int64 [n, 2], names, C columns) -> (outputs: 4 C tensors, fault int64 [5]):
//   column c's values in bytes[ranges[i, 0] : ranges[i, 1]], for every record i.
//   * names: the columns' feature names, as byte strings name_bytes[name_offsets[c] : name_offsets[c + 1]], distinct.
//   * dtypes[c]: an ExampleDtype. int32: the feature is of int64, whose values must fit.
//   * sizes[c]: k >= 0, the values of every record; or -1, any number of them.
//   * absent[c]: what becomes of a record without the feature, or with one that holds no list: an AbsentFeature. Of a
//     column of any number it is a record of 0 values, and absent[c] is kReported or kError, which is not looked at.
//   * defaults[2 c], [2 c + 1]: the k values of kDefault; of strings, their bytes and their k + 1 int64 offsets.
//   * outputs[4 c ...]: values, string offsets, record offsets, present. Values: [n k] or all records', one after the
//     other; of strings all their bytes. String offsets: int64, one more than there are strings; else empty. Record
//     offsets: int64 [n + 1] if sizes[c] is -1; else empty. Present: uint8 [n], 1 where the record has the feature, if
//     absent[c] is kReported; else empty. What a record without the feature has there is 0, or the empty string.
//   * fault: (ExampleFault, record, byte of `bytes`, column or -1, detail); with a fault the outputs mean nothing. The
//     same fault for every number of threads. Of several it is not always the first record's: faults of messages and
//     of numbers of a fixed count are found before those of strings and of any number of values.
//   Rules, those of tf.io.parse_example: of a feature that appears twice the last counts, but for columns of a fixed
//     count, of which it is the last that is not empty; in an entry that has a name or a value twice (which
//     tf.io.parse_example refuses and protobuf would merge) the last counts too. Fields that are not known
//   are skipped; features that are not asked for are not looked into. Packed and unpacked lists may be mixed, and a
//   list may come in pieces, which is more than tf.io.parse_example reads. Varints of up to 10 bytes, whose bits beyond
//   64 are dropped. Groups, field numbers of 0 and lists of several kinds in one feature are faults.
//   Memory: what the outputs take, which for what the message holds is at most 8 times its bytes, and 16 bytes for each
//   record and column of any number.
// encode_examples(names, C columns, rows) -> (bytes uint8, offsets int64 [rows + 1]): the inverse, columns in the form
//   of the outputs above. Row i is bytes[offsets[i] : offsets[i + 1]]; features in the order of the columns, numbers
//   packed, absent ones left out.
//   * dtypes[c], sizes[c]: as above. columns[4 c ...]: values, string offsets, record offsets, present or empty (all
//     are). Values are int64, int32, float32 or uint8, as dtypes[c] says.
//   * A row of 2 GiB or more is an error: protobuf reads no such message.
//
// Errors: ValueError for columns that do not fit together. What a record may hold is no error, but a fault.
// Not differentiable. Deterministic.
// Source: tensorflow/core/example/example.proto, feature.proto; protobuf's encoding; tf.io.parse_example.
#pragma once
#include <tuple>

#include "record.h"

namespace tsr {

// The numbers of these enumerations stand in torchsparse_rec/ops/record_examples.py too.
enum class ExampleDtype : int64_t { kInt64 = 0, kInt32 = 1, kFloat32 = 2, kBytes = 3 };
enum class AbsentFeature : int64_t { kError = 0, kDefault = 1, kReported = 2 };
enum class ExampleFault : int64_t {
  kNone = 0,
  kTruncated = 1,   // a varint or a fixed number that the bytes around it cut off
  kLength = 2,      // a length beyond the end of what it is in; detail: the length
  kVarint = 3,      // more than 10 bytes
  kTag = 4,         // no such field or wire type; detail: the tag
  kFloats = 5,      // packed floats of a length that 4 does not divide; detail: the length
  kKind = 6,        // another kind of list than the column's; detail: the field number of the one that is there
  kCount = 7,       // another number of values than the column's; detail: how many there are
  kAbsent = 8,      // no such feature
  kOutOfInt32 = 9,  // detail: the value
};

constexpr int64_t kAnyNumber = -1;
// Values of a record: its bytes are fewer than 2 GiB, as protobuf's messages are.
constexpr int64_t kMostValues = INT32_MAX;
constexpr int64_t kTensorsPerColumn = 4;

struct FeatureNames {
  Tensor bytes, offsets;

  const uint8_t* data(int64_t c) const {
    return bytes.const_data_ptr<uint8_t>() + offsets.const_data_ptr<int64_t>()[c];
  }
  int64_t size(int64_t c) const {
    const int64_t* const at = offsets.const_data_ptr<int64_t>();
    return at[c + 1] - at[c];
  }
  std::string text(int64_t c) const { return std::string(reinterpret_cast<const char*>(data(c)), size(c)); }
  int64_t count() const { return offsets.size(0) - 1; }
};

inline ScalarType scalar_type_of(ExampleDtype dtype) {
  switch (dtype) {
    case ExampleDtype::kInt64:
      return ScalarType::Long;
    case ExampleDtype::kInt32:
      return ScalarType::Int;
    case ExampleDtype::kFloat32:
      return ScalarType::Float;
    default:
      return ScalarType::Byte;
  }
}

// ---- Checks ---------------------------------------------------------------------------------------------------------

inline FeatureNames checked_names(const char* op, const Tensor& bytes, const Tensor& offsets) {
  check_bytes(op, bytes);
  check_offsets(op, "name_offsets", offsets, bytes.size(0));
  return {as_contiguous(bytes), as_contiguous(offsets)};
}

inline void check_columns(const char* op, const FeatureNames& names, const std::vector<int64_t>& dtypes,
                          const std::vector<int64_t>& sizes) {
  const size_t columns = static_cast<size_t>(names.count());
  TSR_CHECK_VALUE(dtypes.size() == columns && sizes.size() == columns, op, ": dtypes and sizes must have ", columns,
                  " elements, one per name, got ", dtypes.size(), " and ", sizes.size());
  for (size_t c = 0; c < columns; ++c) {
    TSR_CHECK_VALUE(dtypes[c] >= 0 && dtypes[c] <= static_cast<int64_t>(ExampleDtype::kBytes), op, ": dtypes[", c,
                    "] must be 0, 1, 2 or 3, got ", dtypes[c]);
    TSR_CHECK_VALUE(sizes[c] >= kAnyNumber && sizes[c] <= kMostValues, op, ": sizes[", c, "] must be in [-1, ",
                    kMostValues, "], got ", sizes[c]);
  }
}

// A vector of this dtype and, unless it is -1, this many elements.
inline void check_vector(const char* op, const std::string& name, const Tensor& x, ScalarType dtype, int64_t size) {
  const bool fits = x.dim() == 1 && x.scalar_type() == dtype && (size < 0 || x.size(0) == size);
  TSR_CHECK_VALUE(fits, op, ": ", name, " must be a vector of ", dtype_name(dtype), " with ",
                  size < 0 ? std::string("any number of") : std::to_string(size), " elements, got ",
                  dtype_name(x.scalar_type()), " of shape ", shape_text(x));
}

}  // namespace tsr
