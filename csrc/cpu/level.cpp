#include "level.h"

#include <cstdlib>
#include <cstring>

#include "../abi.h"

namespace tsr {
namespace {

CpuLevel machine_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("popcnt");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return CpuLevel::kAvx512;
  }
  if (avx2) return CpuLevel::kAvx2;
#endif
  return CpuLevel::kBaseline;
}

CpuLevel chosen_level() {
  const CpuLevel machine = machine_level();
  const char* wish = std::getenv("TORCHSPARSE_REC_CPU");
  if (wish == nullptr) return machine;
  const CpuLevel asked = std::strcmp(wish, "baseline") == 0 ? CpuLevel::kBaseline
                         : std::strcmp(wish, "avx2") == 0   ? CpuLevel::kAvx2
                                                            : machine;
  return asked < machine ? asked : machine;
}

}  // namespace

CpuLevel cpu_level() {
  static const CpuLevel level = chosen_level();
  return level;
}

int64_t cpu_level_op() { return static_cast<int64_t>(cpu_level()); }

// CPU operators raise at once: there is nothing to collect.
void check_errors_cpu(const Tensor&) {}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CompositeExplicitAutograd, m) {
  TSR_IMPL(m, "cpu_level", &tsr::cpu_level_op);
}

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) { TSR_IMPL(m, "check_errors", &tsr::check_errors_cpu); }
