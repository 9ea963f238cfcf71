#include "crc32c.h"

#include <array>
#include <cstdlib>
#include <cstring>

#include "record_bytes.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define TSR_CRC_TARGET __attribute__((target("sse4.2")))
#define TSR_CRC_WORD(crc, word) _mm_crc32_u64(crc, word)
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define TSR_CRC_TARGET __attribute__((target("+crc")))
#define TSR_CRC_WORD(crc, word) __crc32cd(static_cast<uint32_t>(crc), word)
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define TSR_CRC_TARGET
#define TSR_CRC_WORD(crc, word) __crc32cd(static_cast<uint32_t>(crc), word)
#endif

namespace tsr {
namespace {

// The polynomial, bits reversed: bit 31 is the constant term. Registers hold polynomials that way too.
constexpr uint32_t kPolynomial = 0x82f63b78u;

// ---- Tables ---------------------------------------------------------------------------------------------------------

// kTables[k][b]: what byte b, followed by k zero bytes, adds to a register.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (kPolynomial & (0u - (crc & 1)));
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint32_t step_byte(uint32_t crc, uint8_t byte) { return (crc >> 8) ^ kTables[0][(crc ^ byte) & 0xff]; }

// The register after `size` bytes, eight at a time.
uint32_t update_by_tables(uint32_t crc, const uint8_t* data, int64_t size) {
  for (; size >= 8; data += 8, size -= 8) {
    const uint64_t word = load_word(data) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; size > 0; ++data, --size) crc = step_byte(crc, *data);
  return crc;
}

// ---- Zeros ----------------------------------------------------------------------------------------------------------

// The product of two polynomials modulo the crc's.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ (kPolynomial & (0u - (b & 1)));
  }
  return product;
}

// x^(8 * bytes): a register times this is the register after as many zero bytes.
constexpr uint32_t zeros(int64_t bytes) {
  uint32_t power = 1u << 31, square = 1u << 23;
  for (; bytes != 0; bytes >>= 1) {
    if (bytes & 1) power = multiply(power, square);
    square = multiply(square, square);
  }
  return power;
}

#ifdef TSR_CRC_WORD

// ---- The processor's instruction ------------------------------------------------------------------------------------

// The register after a fixed number of zero bytes, by one look at a table per byte of it.
using ZerosTable = std::array<std::array<uint32_t, 256>, 4>;

constexpr ZerosTable make_zeros(int64_t bytes) {
  ZerosTable table{};
  const uint32_t factor = zeros(bytes);
  for (size_t k = 0; k < 4; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      // Linear: the lowest set bit's entry and that of the others.
      const uint32_t lowest = byte & (0u - byte);
      table[k][byte] = byte == lowest ? (byte == 0 ? 0 : multiply(factor, byte << (8 * k)))
                                      : table[k][lowest] ^ table[k][byte ^ lowest];
    }
  }
  return table;
}

uint32_t after_zeros(const ZerosTable& table, uint32_t crc) {
  return table[0][crc & 0xff] ^ table[1][(crc >> 8) & 0xff] ^ table[2][(crc >> 16) & 0xff] ^ table[3][crc >> 24];
}

// The instruction takes three cycles and one can begin in each, so three lanes of a block are computed at a time: long
// blocks where joining them costs nothing, short ones for what is left.
constexpr int64_t kLongLane = 4096, kShortLane = 256;

constexpr ZerosTable kAfterLong = make_zeros(kLongLane), kAfterShort = make_zeros(kShortLane);

TSR_CRC_TARGET uint32_t update_three_lanes(uint32_t crc, const uint8_t* data, int64_t lane,
                                           const ZerosTable& after_lane) {
  uint64_t first = crc, second = 0, third = 0;
  for (int64_t i = 0; i < lane; i += 8) {
    first = TSR_CRC_WORD(first, load_word(data + i));
    second = TSR_CRC_WORD(second, load_word(data + lane + i));
    third = TSR_CRC_WORD(third, load_word(data + 2 * lane + i));
  }
  crc = after_zeros(after_lane, static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
  return after_zeros(after_lane, crc) ^ static_cast<uint32_t>(third);
}

TSR_CRC_TARGET uint32_t update_by_instruction(uint32_t crc, const uint8_t* data, int64_t size) {
  for (; size >= 3 * kLongLane; data += 3 * kLongLane, size -= 3 * kLongLane) {
    crc = update_three_lanes(crc, data, kLongLane, kAfterLong);
  }
  for (; size >= 3 * kShortLane; data += 3 * kShortLane, size -= 3 * kShortLane) {
    crc = update_three_lanes(crc, data, kShortLane, kAfterShort);
  }
  uint64_t rest = crc;
  for (; size >= 8; data += 8, size -= 8) rest = TSR_CRC_WORD(rest, load_word(data));
  crc = static_cast<uint32_t>(rest);
  for (; size > 0; ++data, --size) crc = step_byte(crc, *data);
  return crc;
}

bool has_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#elif defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_CRC32;
#else
  return true;
#endif
}

#endif

using Update = uint32_t (*)(uint32_t, const uint8_t*, int64_t);

// By the processor's instruction, unless TORCHSPARSE_REC_CPU=baseline asks for what every machine has.
Update pick_update() {
#ifdef TSR_CRC_WORD
  const char* wish = std::getenv("TORCHSPARSE_REC_CPU");
  const bool wanted = wish == nullptr || std::strcmp(wish, "baseline") != 0;
  if (wanted && has_instruction()) return &update_by_instruction;
#endif
  return &update_by_tables;
}

}  // namespace

uint32_t crc32c(const uint8_t* data, int64_t size) {
  static const Update update = pick_update();
  return ~update(~0u, data, size);
}

uint32_t crc32c_joined(uint32_t first, uint32_t second, int64_t second_size) {
  return multiply(zeros(second_size), first) ^ second;
}

}  // namespace tsr
