// The collectives of a warp, computed from the values that its lanes bring.
#include "emulation.h"

namespace tsr::emulated {

int lane() { return static_cast<int>(threadIdx.x % 32); }

int segment_start(int width) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) refuse("a shuffle among ", width, " lanes");
  return lane() & ~(width - 1);
}

uint64_t shuffle_bits(unsigned mask, uint64_t value, int source, Site site) {
  if ((mask >> source & 1) == 0) {
    refuse("lane ", lane(), " shuffles from lane ", source, " outside the mask at ", site.file, ":", site.line);
  }
  const Lanes& lanes = collective(Collective::kShuffle, mask, value, site);
  if ((lanes.present >> source & 1) == 0) {
    refuse("lane ", lane(), " shuffles from lane ", source, ", which takes no part, at ", site.file, ":", site.line);
  }
  return lanes.values[source];
}

std::pair<unsigned, unsigned> vote(unsigned mask, bool predicate, Site site) {
  const Lanes& lanes = collective(Collective::kVote, mask, predicate, site);
  unsigned set = 0;
  for (int i = 0; i < 32; ++i) set |= static_cast<unsigned>((lanes.present >> i & 1) && lanes.values[i] != 0) << i;
  return {set, lanes.present};
}

std::pair<unsigned, unsigned> match(unsigned mask, uint64_t value, Site site) {
  const Lanes& lanes = collective(Collective::kMatch, mask, value, site);
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= static_cast<unsigned>((lanes.present >> i & 1) && lanes.values[i] == value) << i;
  return {same, lanes.present};
}

void check_alignment(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    refuse("thread ", threadIdx.x, " accesses ", bytes, " bytes at an address that is no multiple of them");
  }
}

}  // namespace tsr::emulated
