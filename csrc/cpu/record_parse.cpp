// CPU door of parse_examples. Features are found record by record, and numbers of a fixed count are decoded at once.
// Where a column's room is not known before, a first pass measures each record's list, and a second one decodes it:
// by column and block of records, so that one message that holds a whole batch is decoded by all threads as well.
#include "record_lists.h"
#include "record_split.h"

namespace tsr {
namespace {

constexpr const char* kOp = "parse_examples";

// Records that are one task of a thread.
constexpr int64_t kRecordBlock = 128;
// Bytes of messages in the time of one element of kWorkPerThread.
constexpr int64_t kElementsPerByte = 4;

// A tensor with its address, which takes torch a call to tell.
template <class T>
struct Output {
  Tensor tensor;
  T* data = nullptr;

  Output() = default;
  explicit Output(Tensor tensor_) : tensor(std::move(tensor_)), data(static_cast<T*>(tensor.data_ptr())) {}
};

struct Column {
  int64_t index;
  ExampleDtype dtype;
  int64_t size;
  AbsentFeature absent;
  Output<uint8_t> default_values;
  Output<int64_t> default_offsets;
  Output<void> values;
  Output<int64_t> string_offsets, record_offsets;
  Output<uint8_t> present;
  // For a counted column: each record's feature, and where its strings' bytes begin.
  Buffer<Span> features;
  Buffer<int64_t> byte_offsets;

  bool is_string() const { return dtype == ExampleDtype::kBytes; }
  // Whether its room is known only when the records have been looked into.
  bool is_counted() const { return is_string() || size == kAnyNumber; }
  // Where the values of record r begin.
  int64_t first_value(int64_t r) const { return size == kAnyNumber ? record_offsets.data[r] : r * size; }
  template <class T>
  T* value(int64_t i) const {
    return static_cast<T*>(values.data) + i;
  }
  // Bytes of the values of a record of a fixed count.
  size_t record_bytes() const {
    return static_cast<size_t>(size) * (dtype == ExampleDtype::kInt64 ? sizeof(int64_t) : sizeof(int32_t));
  }
  int64_t default_bytes() const { return absent == AbsentFeature::kDefault ? default_values.tensor.numel() : 0; }
};

// What all passes need.
struct Batch {
  const uint8_t* bytes;
  const uint8_t* limit;
  const int64_t* ranges;
  int64_t records;
  int64_t workers;

  Span record(int64_t r) const { return {bytes + ranges[2 * r], bytes + ranges[2 * r + 1]}; }
  int64_t blocks() const { return (records + kRecordBlock - 1) / kRecordBlock; }
};

// ---- Numbers of a fixed count ---------------------------------------------------------------------------------------

// What a record without the feature has; false if that is a fault.
bool take_absent(Column& column, int64_t r, Fault& fault, const uint8_t* at) {
  if (column.absent == AbsentFeature::kError && column.size != kAnyNumber) {
    return fault.set(ExampleFault::kAbsent, at);
  }
  if (column.absent == AbsentFeature::kReported) column.present.data[r] = 0;
  const size_t bytes = column.is_counted() ? 0 : column.record_bytes();
  if (bytes == 0) return true;
  void* const out = column.value<uint8_t>(r * static_cast<int64_t>(bytes));
  if (column.absent == AbsentFeature::kDefault) {
    std::memcpy(out, column.default_values.data, bytes);
  } else {
    std::memset(out, 0, bytes);
  }
  return true;
}

// The numbers that most features hold; false, without a fault, if this one holds something else than `count` of them.
bool decode_plain(Span feature, const Column& column, const uint8_t* limit, int64_t first, int64_t count) {
  Span run;
  if (!small_packed(feature, list_field(column.dtype), run)) return false;
  switch (column.dtype) {
    case ExampleDtype::kInt64:
      return decode_exactly<WideSink>(run, limit, count, column.value<int64_t>(first));
    case ExampleDtype::kInt32:
      return decode_exactly<NarrowSink>(run, limit, count, column.value<int32_t>(first));
    default:
      if (run.size() != 4 * count) return false;
      for (int64_t i = 0; i < count; ++i) std::memcpy(column.value<float>(first + i), run.begin + 4 * i, 4);
      return true;
  }
}

// The numbers of a feature that has been measured.
bool decode_numbers(Span feature, const Column& column, const uint8_t* limit, int64_t first, Fault& fault) {
  switch (column.dtype) {
    case ExampleDtype::kInt64:
      return decode_integers<WideSink>(feature, limit, column.value<int64_t>(first), fault);
    case ExampleDtype::kInt32:
      return decode_integers<NarrowSink>(feature, limit, column.value<int32_t>(first), fault);
    default:
      return decode_floats(feature, column.value<float>(first), fault);
  }
}

bool decode_fixed(Span feature, Column& column, const Batch& batch, int64_t r, Fault& fault) {
  ListSize size;
  if (feature.begin != nullptr && !measure_list(feature, column.dtype, fault, size)) return false;
  if (!size.found) return take_absent(column, r, fault, batch.record(r).begin);
  if (size.values != column.size) return fault.set(ExampleFault::kCount, feature.begin, size.values);
  return decode_numbers(feature, column, batch.limit, r * column.size, fault);
}

// Finds record r's features and decodes those whose place is known; remembers the others.
bool split_record(RecordSplitter& splitter, std::vector<Column>& columns, const Batch& batch, int64_t r, Fault& fault) {
  if (!splitter.split(batch.record(r), fault)) return false;
  for (Column& column : columns) {
    const Span feature = splitter.feature(column.index);
    if (column.is_counted()) {
      column.features[r] = feature;
    } else if (!decode_plain(feature, column, batch.limit, r * column.size, column.size) &&
               !decode_fixed(feature, column, batch, r, fault)) {
      fault.column = column.index;
      return false;
    }
  }
  return true;
}

// Returns the first record with a fault, or -1.
int64_t split_records(const NameTable& table, std::vector<Column>& columns, const Batch& batch, Fault& fault) {
  std::vector<bool> fixed;
  for (const Column& column : columns) fixed.push_back(column.size != kAnyNumber);
  const RecordSplitter fresh(table, std::move(fixed), batch.limit);
  std::vector<RecordSplitter> splitters(static_cast<size_t>(batch.workers), fresh);
  FirstPosition first_bad;
  parallel_dynamic(batch.blocks(), batch.workers, [&](int64_t worker, int64_t block) {
    Fault ignored;
    for (int64_t r = block * kRecordBlock; r < std::min((block + 1) * kRecordBlock, batch.records); ++r) {
      if (!split_record(splitters[static_cast<size_t>(worker)], columns, batch, r, ignored)) {
        return first_bad.report(r);
      }
    }
  });
  if (!first_bad.found()) return -1;
  RecordSplitter again = fresh;
  split_record(again, columns, batch, first_bad.position(), fault);
  return first_bad.position();
}

// ---- Counted columns ------------------------------------------------------------------------------------------------

// Room for record r's list; a feature without a list loses its beginning.
bool measure_feature(Column& column, const Batch& batch, int64_t r, Fault& fault) {
  Span& feature = column.features[r];
  ListSize size;
  if (feature.begin != nullptr && !measure_list(feature, column.dtype, fault, size)) return false;
  if (!size.found) {
    if (!take_absent(column, r, fault, batch.record(r).begin)) return false;
    feature = Span();
    size.bytes = column.default_bytes();
  } else if (column.size != kAnyNumber && size.values != column.size) {
    return fault.set(ExampleFault::kCount, feature.begin, size.values);
  }
  if (column.size == kAnyNumber) column.record_offsets.data[r + 1] = size.values;
  if (column.is_string()) column.byte_offsets[r + 1] = size.bytes;
  return true;
}

// The strings of a record without the feature: the default's, or empty ones.
void take_default_strings(const Column& column, uint8_t* out, int64_t base, int64_t* ends) {
  const bool by_default = column.absent == AbsentFeature::kDefault;
  for (int64_t i = 0; i < column.size; ++i) ends[i] = base + (by_default ? column.default_offsets.data[i + 1] : 0);
  const size_t bytes = static_cast<size_t>(column.default_bytes());
  if (bytes > 0) std::memcpy(out, column.default_values.data, bytes);
}

bool decode_feature(Column& column, const Batch& batch, int64_t r, Fault& fault) {
  const Span feature = column.features[r];
  const int64_t first = column.first_value(r);
  if (!column.is_string()) {
    return feature.begin == nullptr ||
           decode_plain(feature, column, batch.limit, first, column.first_value(r + 1) - first) ||
           decode_numbers(feature, column, batch.limit, first, fault);
  }
  const int64_t base = column.byte_offsets[r];
  uint8_t* const out = column.value<uint8_t>(base);
  int64_t* const ends = column.string_offsets.data + first + 1;
  if (feature.begin != nullptr) return copy_strings(feature, out, base, ends, fault);
  take_default_strings(column, out, base, ends);
  return true;
}

using FeaturePass = bool (*)(Column&, const Batch&, int64_t, Fault&);

// Runs a pass over the records of all counted columns. Returns the first record with a fault, or -1.
int64_t for_each_feature(const std::vector<Column*>& columns, const Batch& batch, FeaturePass pass, Fault& fault) {
  const int64_t count = static_cast<int64_t>(columns.size());
  FirstPosition first_bad;
  parallel_dynamic(count * batch.blocks(), batch.workers, [&](int64_t, int64_t task) {
    const int64_t c = task / batch.blocks(), block = task % batch.blocks();
    Fault ignored;
    for (int64_t r = block * kRecordBlock; r < std::min((block + 1) * kRecordBlock, batch.records); ++r) {
      if (!pass(*columns[static_cast<size_t>(c)], batch, r, ignored)) return first_bad.report(r * count + c);
    }
  });
  if (!first_bad.found()) return -1;
  Column& column = *columns[static_cast<size_t>(first_bad.position() % count)];
  pass(column, batch, first_bad.position() / count, fault);
  fault.column = column.index;
  return first_bad.position() / count;
}

void make_room(Column& column, const Batch& batch, const Tensor& like) {
  const auto add_up = [&](int64_t* offsets) {
    offsets[0] = 0;
    for (int64_t r = 0; r < batch.records; ++r) offsets[r + 1] += offsets[r];
    return offsets[batch.records];
  };
  const int64_t values = column.size == kAnyNumber ? add_up(column.record_offsets.data) : batch.records * column.size;
  const Asked asked = column.size == kAnyNumber ? Asked{} : Asked{kOp, "sizes", column.size};
  const int64_t room = column.is_string() ? add_up(column.byte_offsets.data()) : values;
  column.values = Output<void>(new_empty(like, {room}, scalar_type_of(column.dtype), asked));
  if (!column.is_string()) return;
  column.string_offsets = Output<int64_t>(new_empty(like, {values + 1}, ScalarType::Long, asked));
  column.string_offsets.data[0] = 0;
}

int64_t parse_counted(const std::vector<Column*>& columns, const Batch& batch, const Tensor& like, Fault& fault) {
  int64_t bad = for_each_feature(columns, batch, &measure_feature, fault);
  if (bad >= 0) return bad;
  for (Column* column : columns) make_room(*column, batch, like);
  return for_each_feature(columns, batch, &decode_feature, fault);
}

// ---- Columns --------------------------------------------------------------------------------------------------------

std::string element(const char* name, size_t i) { return message(name, "[", i, "]"); }

void check_absent(const Column& column, size_t c) {
  TSR_CHECK_VALUE(column.size != kAnyNumber || column.absent != AbsentFeature::kDefault, kOp, ": absent[", c,
                  "] must be 0 or 2, since sizes[", c, "] is -1, got 1");
  if (column.absent != AbsentFeature::kDefault) return;
  if (!column.is_string()) {
    return check_vector(kOp, element("defaults", 2 * c), column.default_values.tensor, scalar_type_of(column.dtype),
                        column.size);
  }
  check_vector(kOp, element("defaults", 2 * c), column.default_values.tensor, ScalarType::Byte, -1);
  check_vector(kOp, element("defaults", 2 * c + 1), column.default_offsets.tensor, ScalarType::Long, column.size + 1);
  const int64_t bytes = column.default_values.tensor.numel(), *const offsets = column.default_offsets.data;
  check_offsets(kOp, element("defaults", 2 * c + 1), column.default_offsets.tensor, bytes);
  TSR_CHECK_VALUE(offsets[0] == 0 && offsets[column.size] == bytes, kOp, ": ", element("defaults", 2 * c + 1),
                  " must go from 0 to ", bytes, ", the number of bytes, got ", offsets[0], " to ",
                  offsets[column.size]);
}

Column make_column(int64_t index, const std::vector<int64_t>& dtypes, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& absent, const std::vector<Tensor>& defaults) {
  const size_t c = static_cast<size_t>(index);
  TSR_CHECK_VALUE(absent[c] >= 0 && absent[c] <= 2, kOp, ": absent[", c, "] must be 0, 1 or 2, got ", absent[c]);
  Column column{};
  column.index = index;
  column.dtype = static_cast<ExampleDtype>(dtypes[c]);
  column.size = sizes[c];
  column.absent = static_cast<AbsentFeature>(absent[c]);
  column.default_values = Output<uint8_t>(as_contiguous(defaults[2 * c]));
  column.default_offsets = Output<int64_t>(as_contiguous(defaults[2 * c + 1]));
  check_absent(column, c);
  return column;
}

void allocate(Column& column, const Batch& batch, const Tensor& like) {
  const int64_t n = batch.records;
  const bool counted = column.is_counted(), any = column.size == kAnyNumber;
  const bool reported = column.absent == AbsentFeature::kReported;
  const std::vector<int64_t> shape = counted ? std::vector<int64_t>{0} : std::vector<int64_t>{n, column.size};
  column.values = Output<void>(new_empty(like, shape, scalar_type_of(column.dtype), {kOp, "sizes", column.size}));
  column.string_offsets = Output<int64_t>(new_empty(like, {0}, ScalarType::Long));
  column.record_offsets = Output<int64_t>(new_empty(like, {any ? n + 1 : 0}, ScalarType::Long));
  column.present = Output<uint8_t>(new_empty(like, {reported ? n : 0}, ScalarType::Byte));
  if (reported) std::fill_n(column.present.data, n, uint8_t{1});
  if (counted) column.features = Buffer<Span>(n);
  if (column.is_string()) column.byte_offsets = Buffer<int64_t>(n + 1);
}

// Raises where a column's values would be more than can be counted.
void check_room(const Batch& batch, const FeatureNames& names, const std::vector<int64_t>& sizes) {
  constexpr int64_t kMost = int64_t{1} << 47;  // as many bytes as a process has addresses
  for (size_t c = 0; c < sizes.size(); ++c) {
    TSR_CHECK_VALUE(sizes[c] <= 0 || batch.records <= kMost / sizes[c], kOp, ": feature '",
                    names.text(static_cast<int64_t>(c)), "' has ", sizes[c], " values in each of ", batch.records,
                    " records, which no memory holds");
  }
}

Batch checked_batch(const Tensor& bytes, const Tensor& ranges) {
  TSR_CHECK_VALUE(ranges.dim() == 2 && ranges.size(1) == 2 && ranges.scalar_type() == ScalarType::Long, kOp,
                  ": ranges must be an int64 matrix of two columns, got ", dtype_name(ranges.scalar_type()),
                  " of shape ", shape_text(ranges));
  const uint8_t* const data = bytes.const_data_ptr<uint8_t>();
  Batch batch{data, data + bytes.size(0), ranges.const_data_ptr<int64_t>(), ranges.size(0), 1};
  int64_t total = 0;
  for (int64_t r = 0; r < batch.records; ++r) {
    const int64_t begin = batch.ranges[2 * r], end = batch.ranges[2 * r + 1];
    TSR_CHECK_VALUE(begin >= 0 && begin <= end && end <= bytes.size(0), kOp, ": ranges[", r,
                    "] must be a range within the ", bytes.size(0), " bytes, got [", begin, ", ", end, "]");
    total += end - begin;
  }
  batch.workers = workers_for(total * kElementsPerByte);
  return batch;
}

Tensor fault_tensor(const Batch& batch, const Tensor& like, const Fault& fault, int64_t record) {
  Tensor out = new_empty(like, {5}, ScalarType::Long);
  int64_t* const numbers = out.mutable_data_ptr<int64_t>();
  const bool any = fault.kind != ExampleFault::kNone;
  numbers[0] = static_cast<int64_t>(fault.kind);
  numbers[1] = record;
  numbers[2] = any ? fault.at - batch.bytes : -1;
  numbers[3] = fault.column;
  numbers[4] = fault.detail;
  return out;
}

}  // namespace

std::tuple<std::vector<Tensor>, Tensor> parse_examples_cpu(const Tensor& bytes, const Tensor& ranges,
                                                           const Tensor& name_bytes, const Tensor& name_offsets,
                                                           const std::vector<int64_t>& dtypes,
                                                           const std::vector<int64_t>& sizes,
                                                           const std::vector<int64_t>& absent,
                                                           const std::vector<Tensor>& defaults) {
  check_bytes(kOp, bytes);
  const Tensor data = as_contiguous(bytes), bounds = as_contiguous(ranges);
  const Batch batch = checked_batch(data, bounds);
  const FeatureNames names = checked_names(kOp, name_bytes, name_offsets);
  check_columns(kOp, names, dtypes, sizes);
  check_room(batch, names, sizes);
  const size_t count = dtypes.size();
  TSR_CHECK_VALUE(absent.size() == count && defaults.size() == 2 * count, kOp, ": absent and defaults must have ",
                  count, " and ", 2 * count, " elements, got ", absent.size(), " and ", defaults.size());
  const NameTable table(names);
  std::vector<Column> columns;
  std::vector<Column*> counted;
  for (int64_t c = 0; c < names.count(); ++c) {
    columns.push_back(make_column(c, dtypes, sizes, absent, defaults));
    allocate(columns.back(), batch, bytes);
  }
  for (Column& column : columns) {
    if (column.is_counted()) counted.push_back(&column);
  }
  Fault fault;
  int64_t bad = split_records(table, columns, batch, fault);
  if (bad < 0) bad = parse_counted(counted, batch, bytes, fault);
  std::vector<Tensor> outputs;
  for (const Column& column : columns) {
    outputs.insert(outputs.end(), {column.values.tensor, column.string_offsets.tensor, column.record_offsets.tensor,
                                   column.present.tensor});
  }
  return {outputs, fault_tensor(batch, bytes, fault, bad)};
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) { TSR_IMPL(m, "parse_examples", &tsr::parse_examples_cpu); }
