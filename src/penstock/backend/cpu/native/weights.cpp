#include "weights.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "half.h"
#include "require.h"

namespace penstock {

namespace {

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

// ---- slabs: many weights share few large mappings, whose pages can be huge ----

constexpr size_t SLAB_BYTES = size_t(64) << 20;

std::pair<std::shared_ptr<const Memory>, std::byte*> allocate(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<const Memory> last;
  static size_t used;
  const std::lock_guard lock(mutex);
  auto slab = last.lock();
  if (!slab || used + bytes > slab->bytes()) {
    last = slab = std::make_shared<const Memory>(std::max(bytes, SLAB_BYTES), Memory::HUGE_PAGES);
    used = 0;
  }
  std::byte* found = slab->as() + used;
  used += round_up(bytes, 64);
  return {std::move(slab), found};
}

// ---- one row in, one row out ----

// RUN consecutive values of a row lie together.
template <class T, auto from, size_t RUN>
struct PlainRow {
  static size_t place(size_t k, size_t lane) { return (k / RUN * LANES + lane) * RUN + k % RUN; }

  static void pack(const uint8_t* row, size_t width, std::byte* panel, size_t lane) {
    for (size_t k = 0; k < width; ++k) std::memcpy(panel + place(k, lane) * sizeof(T), row + k * sizeof(T), sizeof(T));
  }

  static void unpack(const std::byte* panel, size_t width, size_t lane, float* out) {
    for (size_t k = 0; k < width; ++k) out[k] = from(reinterpret_cast<const T*>(panel)[place(k, lane)]);
  }
};

uint32_t word(const void* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return four;
}

// `bits` bits, from bit `from` on, of the 32 codes of one lane of a block.
void pack_bits(const uint8_t* codes, size_t bits, int from, std::byte* out) {
  const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  for (size_t vector = 0; vector < bits; ++vector) {
    uint32_t four = 0;
    for (size_t g = vector, up = 0; g < 8; g += bits, up += bits) four |= (word(codes + g * 4) >> from & mask) << up;
    std::memcpy(out + vector * LANES * 4, &four, 4);
  }
}

void unpack_bits(const std::byte* in, size_t bits, int to, uint8_t* codes) {
  const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  for (size_t g = 0; g < 8; ++g) {
    const uint32_t four = word(in + g % bits * LANES * 4) >> g / bits * bits & mask;
    const uint32_t joined = word(codes + g * 4) | four << to;
    std::memcpy(codes + g * 4, &joined, 4);
  }
}

template <class Q>
struct QuantizedRow {
  using P = Packed<Q>;
  static constexpr bool BYTE_SCALES = Q::SCALE == Scale::HALF_TIMES_BYTE, HEADED = BYTE_SCALES || P::GROUPED;
  static constexpr Grouping GROUPING = Q::GROUPING;

  static void pack(const uint8_t* row, size_t width, std::byte* panel, size_t lane) {
    for (size_t first = 0; first < width / BLOCK; first += P::BLOCKS, row += Q::BYTES) {
      Parts parts = {};
      Q::take(row, parts);
      for (size_t b = 0; b < P::BLOCKS; ++b)
        pack_block(parts, b, panel + P::head(first + b, GROUPING), panel + P::at(first + b, GROUPING), lane);
    }
  }

  static void pack_block(const Parts& parts, size_t b, std::byte* head, std::byte* block, size_t lane) {
    pack_bits(parts.codes + b * BLOCK, Q::LOW, 0, block + lane * 4);
    if constexpr (Q::HIGH) pack_bits(parts.codes + b * BLOCK, Q::HIGH, Q::LOW, block + P::HIGH + lane * 4);
    if constexpr (!P::SMALL) {
      std::memcpy((HEADED ? head : block + P::SCALES) + lane * 2, &parts.d, 2);
      if (Q::MINIMA) std::memcpy((HEADED ? head + LANES * 2 : block + P::MINIMA) + lane * 2, &parts.m, 2);
    }
    if constexpr (P::SMALL || BYTE_SCALES)
      for (size_t g = 0; g < Q::GROUPS; ++g) {
        (P::SMALL ? head : block + P::SCALES)[g * LANES + lane] = std::byte(parts.scales[b * Q::GROUPS + g]);
        if (Q::MINIMA) block[P::MINIMA + g * LANES + lane] = std::byte(parts.minima[b * Q::GROUPS + g]);
      }
  }

  static void unpack(const std::byte* panel, size_t width, size_t lane, float* out) {
    for (size_t b = 0; b < width / BLOCK; ++b)
      unpack_block(panel + P::head(b, GROUPING), panel + P::at(b, GROUPING), lane, out + b * BLOCK);
  }

  static void unpack_block(const std::byte* head, const std::byte* block, size_t lane, float* out) {
    uint8_t codes[BLOCK] = {};
    unpack_bits(block + lane * 4, Q::LOW, 0, codes);
    if constexpr (Q::HIGH) unpack_bits(block + P::HIGH + lane * 4, Q::HIGH, Q::LOW, codes);
    for (size_t j = 0; j < BLOCK; ++j) {
      const size_t at = j * Q::GROUPS / BLOCK * LANES + lane;
      const float scale = factor(head, block + P::SCALES, at) * Q::FACTOR, value = float(number(codes[j]));
      const float minimum = Q::MINIMA ? factor(head + LANES * 2, block + P::MINIMA, at) : 0;
      out[j] = GROUPING.zeros ? scale * (value + minimum) : Q::MINIMA ? scale * value + minimum : scale * value;
    }
  }

  static float factor(const std::byte* head, const std::byte* own, size_t at) {
    if constexpr (Q::SCALE == Scale::E4M3) return from_e4m3(uint8_t(head[at]));
    if constexpr (Q::SCALE == Scale::E8M0) return from_e8m0(uint8_t(head[at]));
    if constexpr (BYTE_SCALES) return from_half(word16(head + at % LANES * 2)) * float(int8_t(own[at]));
    if constexpr (P::GROUPED) return from_half(word16(head + at % LANES * 2));
    return from_half(word16(own + at * 2));
  }

  static uint16_t word16(const std::byte* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return bits;
  }

  static int number(uint8_t code) {
    if constexpr (Q::TABLED)
      return Q::TABLE[code];
    else
      return (Q::LOW == 8 && !Q::MINIMA ? int8_t(code) : code) - Q::ZERO;
  }
};

// ---- properties of formats ----

struct Packing {
  const char* name;
  size_t values, bytes;  // per storage block in a checkpoint
  size_t packed;         // bytes of 16 packed ones
  size_t alignment;      // panels, in bytes
  const int8_t* table;
  float factor;
  Grouping grouping;
  void (*pack)(const uint8_t* row, size_t width, std::byte* panel, size_t lane);
  void (*unpack)(const std::byte* panel, size_t width, size_t lane, float* out);
};

template <class T, auto from, size_t RUN = 1>
constexpr Packing plain(const char* name) {
  return {name, 1, sizeof(T), LANES * sizeof(T), 1, nullptr, 1, {}, PlainRow<T, from, RUN>::pack,
          PlainRow<T, from, RUN>::unpack};
}

template <class... Q>
constexpr std::array<Packing, FORMATS> packings(Types<Q...>) {
  return {plain<float, [](float value) { return value; }>("F32"), plain<uint16_t, from_half>("F16"),
          plain<uint16_t, from_bfloat, 2>("BF16"),
          Packing{Q::NAME, Q::VALUES, Q::BYTES, Packed<Q>::BYTES, Packed<Q>::ALIGNMENT, Q::TABLE, Q::FACTOR,
                  Q::GROUPING, QuantizedRow<Q>::pack, QuantizedRow<Q>::unpack}...};
}

constexpr auto PACKINGS = packings(QuantizedFormats{});

Format format_of(const std::string& name) {
  for (size_t i = 0; i < FORMATS; ++i)
    if (name == PACKINGS[i].name) return Format(i);
  throw std::invalid_argument("no native kernel for weights of format " + name);
}

const Packing& packing_of(Format format) { return PACKINGS[size_t(format)]; }

// A part without its place among the others.
Part part_of(const std::string& name, size_t rows, size_t width) {
  const size_t panels = round_up(rows, LANES) / LANES;
  if (auto trellis = trellis_named(name)) {
    if (width % HADAMARD_VALUES || rows % HADAMARD_VALUES)
      throw std::invalid_argument("EXL3 weights have multiples of 128 rows and columns");
    return {TRELLIS, rows, 0, panels, width * trellis->steps.bits * LANES / 8, nullptr, nullptr, 1, {},
            std::move(trellis)};
  }
  const Format format = format_of(name);
  const Packing& packing = packing_of(format);
  if (width % packing.values)
    throw std::invalid_argument(name + " rows hold a multiple of " + std::to_string(packing.values) + " values; got " +
                                std::to_string(width));
  const bool apart = format == Format::F32 || format == Format::F16;  // kernels take these one by one
  const size_t bytes = (apart ? width : round_up(width, BLOCK)) / packing.values * packing.packed;
  return {format, rows, 0, panels, round_up(bytes, packing.alignment), nullptr, packing.table, packing.factor, packing.grouping};
}

}  // namespace

double packed_bits(const std::string& format) {
  if (const auto trellis = trellis_named(format)) return double(trellis->steps.bits);
  const Packing& packing = packing_of(format_of(format));
  return double(packing.packed) / double(LANES * packing.values) * 8;
}

Weight::Weight(size_t width, const std::vector<std::pair<std::string, size_t>>& parts) : width_(width) {
  for (const auto& [name, rows] : parts) {
    if (width == 0 || rows == 0 || width > INT32_MAX || rows > INT32_MAX - rows_)
      throw std::invalid_argument("a weight needs rows and columns, fewer than 2^31 of each");
    Part& part = parts_.emplace_back(part_of(name, rows, width));
    part.column = rows_;
    coded_ |= part.format >= Format::QUANTIZED && part.format != TRELLIS;
    bfloat_ |= part.format == Format::BF16;
    rows_ += rows;
    panels_ += part.panels;
    bytes_ += round_up(part.panels * part.panel_bytes, 64);
    require(trellis() == (part.format == TRELLIS), "a weight has EXL3 parts alone, or none");
  }
  if (parts_.empty()) throw std::invalid_argument("a weight needs at least one part");
  std::byte* next;
  std::tie(slab_, next) = allocate(bytes_);
  for (auto& part : parts_) {
    part.data = next;
    next += round_up(part.panels * part.panel_bytes, 64);
  }
}

size_t Weight::row_bytes(size_t part) const {
  if (part >= parts_.size()) throw std::invalid_argument("the weight has no such part");
  if (trellis()) return parts_[part].panel_bytes / LANES;
  const Packing& packing = packing_of(parts_[part].format);
  return width_ / packing.values * packing.bytes;
}

void Weight::check(size_t part, size_t row, size_t rows, size_t size) const {
  const size_t stride = row_bytes(part);
  const Part& target = parts_[part];
  if (row > target.rows || rows > target.rows - row) throw std::invalid_argument("rows outside the part");
  require(!trellis() || (row % LANES == 0 && rows % LANES == 0), "EXL3 weights are packed in whole tiles");
  if (size != rows * stride)
    throw std::invalid_argument(std::to_string(rows) + " rows take " + std::to_string(rows * stride) + " bytes; got " +
                                std::to_string(size));
}

void Weight::fill(size_t part, size_t row, size_t rows, const uint8_t* bytes, size_t size) {
  check(part, row, rows, size);
  const size_t stride = row_bytes(part);
  const Part& target = parts_[part];
  if (trellis())
    return pack_tiles(target.trellis->steps.bits, bytes, rows / LANES * (width_ / LANES),
                      target.data + row / LANES * target.panel_bytes);
  const auto pack = packing_of(target.format).pack;
  for (size_t i = row; i < row + rows; ++i)
    pack(bytes + (i - row) * stride, width_, target.data + i / LANES * target.panel_bytes, i % LANES);
}

void fill_parts(const std::vector<Source>& sources, unsigned threads) {
  constexpr size_t PIECE_BYTES = size_t(1) << 18;
  struct Piece {
    const Source* source;
    size_t row, rows;
  };
  std::vector<Piece> pieces;
  for (const Source& source : sources) {
    const size_t stride = source.weight->row_bytes(source.part), rows = source.weight->rows(source.part);
    source.weight->check(source.part, 0, rows, source.size);
    const size_t step = round_up(PIECE_BYTES / stride, LANES) + LANES;
    for (size_t row = 0; row < rows; row += step) pieces.push_back({&source, row, std::min(step, rows - row)});
  }
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < pieces.size(); i = next++) {
      const auto [source, row, rows] = pieces[i];
      const size_t stride = source->weight->row_bytes(source->part);
      source->weight->fill(source->part, row, rows, source->bytes + row * stride, rows * stride);
    }
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min<size_t>(threads, pieces.size()); ++i) helpers.emplace_back(work);
  work();
  for (auto& helper : helpers) helper.join();
}

void Weight::set_bias(std::vector<float> bias) {
  if (bias.size() != rows_) throw std::invalid_argument("a bias has one value for each row");
  bias_ = std::move(bias);
}

void Weight::set_factor(size_t part, float factor) {
  if (part >= parts_.size() || !parts_[part].table) throw std::invalid_argument("only formats with a table have a factor");
  parts_[part].factor = packing_of(parts_[part].format).factor * factor;
}

void Weight::set_trellis(size_t part, std::vector<float> inputs, std::vector<float> outputs) {
  require(part < parts_.size() && trellis(), "the weight has no such EXL3 part");
  require(inputs.size() == width_ && outputs.size() == parts_[part].rows, "EXL3 has a factor for each row and column");
  parts_[part].trellis->inputs = std::move(inputs);
  parts_[part].trellis->outputs = std::move(outputs);
}

bool Weight::same_layout(const Weight& other) const {
  const auto same = [](const Part& one, const Part& two) {
    return one.format == two.format && one.rows == two.rows &&
           (one.format != TRELLIS || trellis_name(*one.trellis) == trellis_name(*two.trellis));
  };
  return width_ == other.width_ && bias_.size() == other.bias_.size() &&
         std::equal(parts_.begin(), parts_.end(), other.parts_.begin(), other.parts_.end(), same);
}

void require_panels(const Weight& weight) {
  require(!weight.trellis(), "only a product of whole rows takes an EXL3 weight");
}

void Weight::exchange(Weight& other) {
  require(same_layout(other), "only weights with the same shape, formats and biases can be exchanged");
  std::swap(*this, other);
}

bool Weight::precise() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.format == Format::F32; });
}

bool Weight::gateable() const {
  return parts_.size() == 2 && coded_ && parts_[0].format == parts_[1].format && parts_[0].rows == parts_[1].rows &&
         parts_[0].factor == parts_[1].factor && bias_.empty();
}

Run Weight::panels(size_t first, size_t most) const {
  const Part* part = parts_.data();
  for (; first >= part->panels; ++part) first -= part->panels;
  const size_t panels = std::min(most, part->panels - first), row = first * LANES;
  return {part, part->data + first * part->panel_bytes, part->column + row, std::min(panels * LANES, part->rows - row),
          panels};
}

void Weight::read_row(size_t row, float* out) const {
  const Part* part = parts_.data();
  for (; row >= part->rows; ++part) row -= part->rows;
  const Packing& packing = packing_of(part->format);
  packing.unpack(part->data + row / LANES * part->panel_bytes, width_, row % LANES, out);
  if (const float factor = part->factor / packing.factor; factor != 1)
    for (size_t k = 0; k < width_; ++k) out[k] *= factor;
}

}  // namespace penstock
