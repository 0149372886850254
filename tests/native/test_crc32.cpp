// CRCs against those of Python's zlib.
#include "crc32.h"

#include "check.h"

namespace penstock::test {

namespace {

std::vector<std::byte> counted(size_t size) {
  std::vector<std::byte> data(size);
  for (size_t i = 0; i < size; ++i) data[i] = std::byte(i % 251);
  return data;
}

}  // namespace

void test_crc32() {
  const struct {
    size_t size;
    uint32_t crc;
  } known[] = {{0, 0x00000000},   {3, 0x0854897f},   {16, 0xcecee288},  {63, 0xdbdea683},   {64, 0x100ece8c},
               {65, 0x40c06fd8},  {79, 0x936b1b98},  {80, 0xca26c3e1},  {127, 0xdec481aa},  {128, 0x24650d57},
               {300, 0xe87f7ee4}, {4096, 0xd465f907}, {5003, 0x146fb0dc}};
  for (const auto& [size, crc] : known) {
    check(crc32(counted(size)) == crc, "the CRC of " + std::to_string(size) + " bytes");
  }
  check(crc32(counted(300), 0x12345678) == 0xf1d2c8d1, "a CRC that goes on from another");
}

}  // namespace penstock::test
