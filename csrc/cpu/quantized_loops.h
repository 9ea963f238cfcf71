// The loops over rows of fewer bytes, compiled per instruction set.
#pragma once
#include "../quantized.h"
#include "row_loops.h"

namespace tsr {

// F: a row's format. R: as of PoolArguments, of which table, stride, out_stride and wide are not read here: rows are
// those of `table`, and out is [bags, dim].
template <class F, class R>
struct QuantizedLoops {
  // out[i, :] = row rows[i], for i in [begin, end).
  void (*gather)(const uint8_t* table, int64_t dim, const R* rows, int64_t begin, int64_t end, float* out);
  // Of rows with a scale alone: those of half types have RowLoops.
  void (*pool)(const PoolArguments<float, R>& arguments, const uint8_t* table);
  // Elementwise maximum or minimum: a NaN wins over all.
  OfExtremes<void (*)(const PoolArguments<float, R>& arguments, const uint8_t* table)> pool_extremes;
};

template <class F, class R>
const QuantizedLoops<F, R>& quantized_loops();

}  // namespace tsr
