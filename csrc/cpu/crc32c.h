// CRC-32C (Castagnoli, polynomial 0x1EDC6F41, reflected) of bytes in memory: the check of TFRecord and of Arrow files'
// buffers. By the processor's own instruction where it has one (SSE4.2, ARMv8 CRC), else by tables; same results.
#pragma once
#include <cstdint>

namespace tsr {

// The crc of `size` bytes.
uint32_t crc32c(const uint8_t* data, int64_t size);

// The crc of two runs of bytes, one after the other, from the crc of each: pieces can be computed in parallel.
uint32_t crc32c_joined(uint32_t first, uint32_t second, int64_t second_size);

// What TFRecord stores instead of a crc, so that a crc over data that holds crcs stays a good check.
inline uint32_t masked_crc32c(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

}  // namespace tsr
