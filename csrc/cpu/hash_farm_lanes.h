// FarmHash on the lanes of hash_lanes.h, several texts at a time: the functions of the same names in csrc/hash_farm.h.
// No include guard: it is part of a body of isa_foreach.h.
#include "hash_lanes.h"

static inline Lanes farm_shift_mix(Lanes v) { return v ^ v >> 47; }

static inline Lanes farm_mix16(Lanes u, Lanes v, Lanes multiplier) {
  const Lanes a = farm_shift_mix((u ^ v) * multiplier);
  const Lanes b = farm_shift_mix((v ^ a) * multiplier);
  return b * multiplier;
}

static inline Lanes farm_multiplier(Lanes n) { return splat(kFarm2) + n + n; }

static inline Lanes farm_1_to_3(Lanes first, Lanes middle, Lanes last, Lanes n) {
  const Lanes y = first + (middle << 8);
  const Lanes z = n + (last << 2);
  return farm_shift_mix(y * splat(kFarm2) ^ z * splat(kFarm0)) * splat(kFarm2);
}

static inline Lanes farm_4_to_7(Lanes first, Lanes last, Lanes n) {
  return farm_mix16(n + (first << 3), last, farm_multiplier(n));
}

static inline Lanes farm_8_to_16(Lanes first, Lanes last, Lanes n) {
  const Lanes multiplier = farm_multiplier(n);
  const Lanes a = first + splat(kFarm2);
  const Lanes c = rotate_right(last, 37) * multiplier + a;
  const Lanes d = (rotate_right(a, 25) + last) * multiplier;
  return farm_mix16(c, d, multiplier);
}

static inline Lanes farm_17_to_32(Lanes first, Lanes second, Lanes before_last, Lanes last, Lanes n) {
  const Lanes multiplier = farm_multiplier(n);
  const Lanes a = first * splat(kFarm1);
  const Lanes c = last * multiplier;
  const Lanes d = before_last * splat(kFarm2);
  return farm_mix16(rotate_right(a + second, 43) + rotate_right(c, 30) + d,
                    a + rotate_right(second + splat(kFarm2), 18) + c, multiplier);
}
