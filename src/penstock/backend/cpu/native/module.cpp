// Binds what Python may call. Types, shapes and layouts of arrays are checked here, their contents in Program.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <thread>

#include "block_table.h"
#include "chain_hash.h"
#include "crc32.h"
#include "dispatch.h"
#include "packed_file.h"
#include "program.h"
#include "quantize.h"
#include "require.h"
#include "suffixes.h"
#include "weights.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace penstock;

template <class T, size_t Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using IntArray = Array<const int32_t, 1>;

template <class Elements>
auto flat(const Elements& array) {
  return std::span(array.data(), array.size());
}

template <class Elements>
auto copied(const Elements& array) {
  return std::vector(array.data(), array.data() + array.size());
}

using VectorArrays = std::map<std::string, Array<const float, 1>>;

Vectors copied_vectors(const VectorArrays& arrays) {
  Vectors vectors;
  for (const auto& [name, array] : arrays) vectors[name] = copied(array);
  return vectors;
}

// Releases the interpreter's lock. A thread that comes back while the interpreter ends waits for the end of the
// process: Python would end the thread by unwinding its stack. No destructor lets that through: the process would abort.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }

 private:
  PyThreadState* state_;
};

void fill(Weight& weight, size_t part, size_t row, size_t rows, Array<const uint8_t, 1> bytes) {
  const WithoutGil release;
  weight.fill(part, row, rows, bytes.data(), bytes.size());
}

void fill_all(std::vector<std::tuple<Weight*, size_t, Array<const uint8_t, 1>>> parts, unsigned threads) {
  std::vector<Source> sources;
  for (const auto& [weight, part, bytes] : parts) sources.push_back({weight, part, bytes.data(), bytes.size()});
  const WithoutGil release;
  fill_parts(sources, threads);
}

bool read_packed_weights(int file, uint64_t offset, const std::vector<Weight*>& weights, uint64_t expected,
                         unsigned threads) {
  const WithoutGil release;
  return read_packed(file, offset, weights, expected, threads);
}

uint64_t checksum_of(Array<const uint8_t, 1> bytes) {
  const WithoutGil release;
  return checksum(std::as_bytes(flat(bytes)));
}

nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> packed_bytes(const Weight& weight) {
  using Bytes = std::shared_ptr<std::byte>;
  auto bytes = std::make_unique<Bytes>(weight.packed());
  const auto* data = reinterpret_cast<const uint8_t*>(bytes->get());
  const nb::capsule owner(bytes.release(), [](void* held) noexcept { delete static_cast<Bytes*>(held); });
  return {data, {weight.bytes()}, owner};
}

bool quantize_values(const std::string& from, Array<const uint8_t, 1> values, const std::string& to,
                     Array<uint8_t, 1> out, unsigned threads, const std::string& isa) {
  const WithoutGil release;
  return quantize(from, flat(values), to, flat(out), threads, isa);
}

using FloatArray = Array<const float, 1>;
using FlatEdits =
    std::tuple<IntArray, FloatArray, IntArray, IntArray, IntArray, FloatArray, IntArray, IntArray, IntArray>;
using Scored = std::tuple<int32_t, double, std::vector<std::pair<int32_t, double>>>;

Step step(const IntArray& tokens, const IntArray& positions, const IntArray& row_start, const IntArray& slots,
          const Array<const int32_t, 3>& tables, const IntArray& sampled) {
  if (tables.shape(1) + 1 != row_start.size()) throw nb::value_error("every row needs a block table");
  return {flat(tokens), flat(positions),   flat(row_start),  flat(slots),
          flat(tables), tables.shape(0), tables.shape(2), flat(sampled)};
}

void run(Program& program, IntArray tokens, IntArray positions, IntArray row_start, IntArray slots,
         Array<const int32_t, 3> tables, IntArray sampled, Array<float, 2> out) {
  const Step arrays = step(tokens, positions, row_start, slots, tables, sampled);
  const WithoutGil release;
  program.run(arrays, flat(out));
}

std::pair<std::vector<int32_t>, std::vector<Scored>> sample(
    Program& program, IntArray tokens, IntArray positions, IntArray row_start, IntArray slots,
    Array<const int32_t, 3> tables, IntArray sampled, IntArray target, FloatArray temperature, FloatArray top_p,
    IntArray top_k, FloatArray min_p,
    Array<const uint64_t, 1> seed, IntArray logprobs, const FlatEdits& edits, IntArray constrained,
    Array<const int32_t, 2> words) {
  const Step arrays = step(tokens, positions, row_start, slots, tables, sampled);
  const Draws draws = {flat(target), flat(temperature), flat(top_p),   flat(top_k),
                       flat(min_p),  flat(seed),        flat(logprobs)};
  const WithoutGil release;
  const EditArrays changes = std::apply([](const auto&... array) { return EditArrays{flat(array)...}; }, edits);
  Answers answers = program.sample(arrays, draws, edits_of(changes, {flat(constrained), flat(words), words.shape(1)}));
  std::vector<Scored> scored;
  for (auto& entry : answers.logprobs) scored.push_back({entry.token, entry.logprob, std::move(entry.top)});
  return {std::move(answers.tokens), std::move(scored)};
}

nb::list chain_of(nb::bytes parent, std::span<const int32_t> tokens, size_t block_size) {
  nb::list found;
  const std::span bytes(static_cast<const uint8_t*>(parent.data()), parent.size());
  for (const Digest& digest : chain_hashes(bytes, tokens, block_size))
    found.append(nb::bytes(digest.data(), digest.size()));
  return found;
}

int32_t token_id(PyObject* object) {
  const long value = PyLong_AsLong(object);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  if (value < INT32_MIN || value > INT32_MAX) throw nb::value_error("a token id does not fit 32 bits");
  return int32_t(value);
}

// An int of one digit and no sign, read where it lies: PyLong_AsLong for each token took a quarter of the time to hash
// them. -1: it is none.
inline int32_t one_digit(PyObject* object) {
  if (!PyLong_CheckExact(object)) return -1;
  const auto* number = reinterpret_cast<const PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030C0000
  return PyUnstable_Long_IsCompact(number) ? int32_t(PyUnstable_Long_CompactValue(number)) : -1;
#else
  return Py_SIZE(object) == 1 ? int32_t(number->ob_digit[0]) : -1;
#endif
}

std::vector<int32_t> token_ids(nb::sequence tokens) {
  const auto ids = nb::steal(PySequence_Fast(tokens.ptr(), "tokens are a sequence of ints"));
  if (!ids.is_valid()) throw nb::python_error();
  std::vector<int32_t> values(size_t(PySequence_Fast_GET_SIZE(ids.ptr())));
  PyObject** items = PySequence_Fast_ITEMS(ids.ptr());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = one_digit(items[i]);
    if (values[i] < 0) values[i] = token_id(items[i]);
  }
  return values;
}

Digest digest_of(nb::handle block) {
  const bool fits = PyBytes_Check(block.ptr()) && PyBytes_GET_SIZE(block.ptr()) == sizeof(Digest);
  if (!fits) throw nb::value_error("a chain hash is 16 bytes");
  Digest digest;
  std::memcpy(digest.data(), PyBytes_AS_STRING(block.ptr()), sizeof digest);
  return digest;
}

// All replicas' bits as one int.
nb::object bits_of(const BlockTable& table, nb::handle block, nb::object otherwise) {
  const auto words = table.find(digest_of(block));
  if (words.empty()) return otherwise;
  if (words.size() == 1) return nb::int_(words[0]);
#if PY_VERSION_HEX >= 0x030D0000
  return nb::steal(PyLong_FromUnsignedNativeBytes(words.data(), words.size_bytes(), Py_ASNATIVEBYTES_LITTLE_ENDIAN));
#else
  const auto* bytes = reinterpret_cast<const unsigned char*>(words.data());
  return nb::steal(_PyLong_FromByteArray(bytes, words.size_bytes(), true, false));
#endif
}

// Changes are pairs of a tier and a block; `bits` has a replica's bits for each tier.
void write_blocks(BlockTable& table, size_t replica, nb::iterable changes, const std::array<uint64_t, 3>& bits) {
  for (nb::handle each : changes) {
    const auto change = nb::cast<std::pair<size_t, nb::handle>>(each);
    table.set(replica, digest_of(change.second), bits.at(change.first));
  }
}

nb::list blocks_held(const BlockTable& table, size_t replica) {
  nb::list found;
  for (const auto& [bits, block] : table.held_by(replica))
    found.append(nb::make_tuple(bits, nb::bytes(block.data(), block.size())));
  return found;
}

// The bytes of any object that shows them, such as a memoryview, without a copy.
class BytesView {
 public:
  explicit BytesView(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE)) throw nb::python_error();
  }
  BytesView(const BytesView&) = delete;
  BytesView& operator=(const BytesView&) = delete;
  ~BytesView() { PyBuffer_Release(&view_); }
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(view_.buf), size_t(view_.len)}; }

 private:
  Py_buffer view_;
};

uint32_t crc32_of(nb::handle data, uint32_t start) {
  const BytesView view(data);
  const WithoutGil release;
  return crc32(view.bytes(), start);
}

// Returns bytes that `fill` writes.
template <class Fill>
nb::bytes filled_bytes(size_t size, Fill fill) {
  auto data = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size)));
  if (!data.is_valid()) throw nb::python_error();
  const std::span out(reinterpret_cast<std::byte*>(PyBytes_AsString(data.ptr())), size);
  const WithoutGil release;
  fill(out);
  return data;
}

nb::bytes export_states(Program& program, const std::vector<int64_t>& states) {
  return filled_bytes(states.size() * program.state_bytes(), [&](auto out) { program.export_states(states, out); });
}

void import_states(Program& program, const std::vector<int64_t>& states, nb::handle data) {
  const BytesView view(data);
  const WithoutGil release;
  program.import_states(states, view.bytes());
}

// Of a program's KV or of hidden states.
template <class Stored>
nb::bytes export_blocks(Stored& stored, const std::vector<int64_t>& blocks) {
  return filled_bytes(blocks.size() * stored.block_bytes(), [&](auto out) { stored.export_blocks(blocks, out); });
}

template <class Stored>
void import_blocks(Stored& stored, const std::vector<int64_t>& blocks, nb::handle data) {
  const BytesView view(data);
  const WithoutGil release;
  stored.import_blocks(blocks, view.bytes());
}

// Copies blocks to or from rows, at `offset` of each; returns their CRCs, with which those of what comes before go on.
template <class Stored>
std::vector<uint32_t> copy_rows(Stored& stored, const std::vector<int64_t>& blocks, std::byte* data, size_t count,
                                size_t row_bytes, const std::vector<size_t>& places, size_t offset,
                                std::vector<uint32_t> crcs, Way way) {
  require(places.size() == blocks.size(), "each block has a place");
  require(crcs.empty() || crcs.size() == blocks.size(), "each block has a CRC, or none has");
  require(offset <= row_bytes && stored.block_bytes() <= row_bytes - offset, "the blocks are longer than rows");
  BlockRows rows = {{}, std::move(crcs)};
  for (const size_t place : places) {
    require(place < count, "place " + std::to_string(place) + " is not among " + std::to_string(count));
    rows.begin.push_back(data + place * row_bytes + offset);
  }
  const WithoutGil release;
  stored.copy_rows(blocks, rows, way);
  return std::move(rows.crcs);
}

template <class Stored>
std::vector<uint32_t> copy_out(Stored& stored, const std::vector<int64_t>& blocks, Array<uint8_t, 2> rows,
                               const std::vector<size_t>& places, size_t offset, std::vector<uint32_t> crcs) {
  auto* data = reinterpret_cast<std::byte*>(rows.data());
  return copy_rows(stored, blocks, data, rows.shape(0), rows.shape(1), places, offset, std::move(crcs), Way::OUT);
}

template <class Stored>
std::vector<uint32_t> copy_in(Stored& stored, const std::vector<int64_t>& blocks, Array<const uint8_t, 2> rows,
                              const std::vector<size_t>& places, size_t offset, std::vector<uint32_t> crcs) {
  auto* data = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(rows.data()));  // is only read
  return copy_rows(stored, blocks, data, rows.shape(0), rows.shape(1), places, offset, std::move(crcs), Way::IN);
}

Routing::Scoring scoring_of(const std::string& name) {
  if (name == "softmax") return Routing::SOFTMAX;
  if (name == "sigmoid") return Routing::SIGMOID;
  if (name == "softmax_top_k") return Routing::SOFTMAX_TOP_K;
  throw nb::value_error(("no scoring " + name).c_str());
}

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a process may end while a model is loaded

  m.def("isas", [] {
    std::vector<std::string> names;
    for (const auto& isa : isas()) names.push_back(isa.name);
    return names;
  });

  m.def("has_fast_crc32", has_fast_crc32);
  m.def("crc32", crc32_of, "data"_a, "start"_a = 0);

  m.def("chain_hashes",
        [](nb::bytes parent, IntArray tokens, size_t block_size) { return chain_of(parent, flat(tokens), block_size); },
        "parent"_a, "tokens"_a.noconvert(), "block_size"_a);
  m.def("chain_hashes",
        [](nb::bytes parent, nb::sequence tokens, size_t block_size) {
          return chain_of(parent, token_ids(tokens), block_size);
        },
        "parent"_a, "tokens"_a, "block_size"_a);

  nb::class_<BlockTable>(m, "BlockTable")
      .def(nb::init<>())
      .def("get", bits_of, "block"_a, "otherwise"_a)
      .def("write", write_blocks, "replica"_a, "changes"_a, "bits"_a)
      .def("clear", &BlockTable::clear, "replica"_a)
      .def("held_by", blocks_held, "replica"_a)
      .def("__len__", &BlockTable::size);

  nb::class_<SuffixAutomaton>(m, "SuffixAutomaton")
      .def(nb::init<size_t>(), "capacity"_a)
      .def("extend", [](SuffixAutomaton& automaton, nb::sequence tokens) { automaton.extend(token_ids(tokens)); },
           "tokens"_a)
      .def("continuation", &SuffixAutomaton::continuation, "most"_a)
      .def("__len__", &SuffixAutomaton::size)
      .def_prop_ro("nbytes", &SuffixAutomaton::bytes);

  nb::class_<SuffixCursor>(m, "SuffixCursor")
      .def(nb::init<const SuffixAutomaton&>(), "automaton"_a, nb::keep_alive<1, 2>())
      .def("advance", [](SuffixCursor& cursor, nb::sequence tokens) { cursor.advance(token_ids(tokens)); }, "tokens"_a)
      .def("continuation", &SuffixCursor::continuation, "most"_a);

  nb::class_<Weight>(m, "Weight")
      .def(nb::init<size_t, const std::vector<std::pair<std::string, size_t>>&>(), "width"_a, "parts"_a)
      .def("fill", fill, "part"_a, "row"_a, "rows"_a, "data"_a.noconvert())
      .def("set_bias", [](Weight& weight, Array<const float, 1> bias) { weight.set_bias(copied(bias)); },
           "bias"_a.noconvert())
      .def("set_factor", &Weight::set_factor, "part"_a, "factor"_a)
      .def("set_trellis",
           [](Weight& weight, size_t part, Array<const float, 1> inputs, Array<const float, 1> outputs) {
             weight.set_trellis(part, copied(inputs), copied(outputs));
           },
           "part"_a, "inputs"_a.noconvert(), "outputs"_a.noconvert())
      .def("exchange", &Weight::exchange, "other"_a)
      .def_prop_ro("width", &Weight::width)
      .def_prop_ro("rows", [](const Weight& weight) { return weight.rows(); })
      .def_prop_ro("nbytes", &Weight::bytes)
      .def_prop_ro("packed", packed_bytes, nb::rv_policy::automatic)
      .def_prop_ro("gateable", &Weight::gateable)
      .def_prop_ro("coded", &Weight::coded)
      .def_prop_ro("precise", &Weight::precise);

  nb::class_<Adapter>(m, "Adapter")
      .def(nb::init<>())
      .def("add", &Adapter::add, "weight"_a, "a"_a, "parts"_a)
      .def_prop_ro("nbytes", &Adapter::bytes);

  m.def("fill_parts", fill_all, "parts"_a, "threads"_a);
  m.def("packed_bits", packed_bits, "format"_a);
  m.attr("PIECE_BYTES") = PIECE_BYTES;
  m.def("checksum", checksum_of, "data"_a.noconvert());
  m.def("read_packed", read_packed_weights, "file"_a, "offset"_a, "weights"_a, "checksum"_a, "threads"_a);

  nb::class_<MemoryFile>(m, "MemoryFile")
      .def(nb::init<int, size_t>(), "descriptor"_a, "end"_a)
      .def_ro("end", &MemoryFile::end);

  nb::class_<HiddenRows>(m, "HiddenRows")
      .def("reserve", &HiddenRows::reserve, "blocks"_a, "block_size"_a, "file"_a.none() = nb::none())
      .def("copy_blocks", &HiddenRows::copy_blocks, "pairs"_a)
      .def("export_blocks", export_blocks<HiddenRows>, "blocks"_a)
      .def("import_blocks", import_blocks<HiddenRows>, "blocks"_a, "data"_a)
      .def("copy_out", copy_out<HiddenRows>, "blocks"_a, "rows"_a.noconvert(), "places"_a, "offset"_a, "crcs"_a)
      .def("copy_in", copy_in<HiddenRows>, "blocks"_a, "rows"_a.noconvert(), "places"_a, "offset"_a, "crcs"_a)
      .def_prop_ro("kv_bytes_per_token", &HiddenRows::bytes_per_token)
      .def_prop_ro("block_bytes", &HiddenRows::block_bytes)
      .def_prop_ro("kv_layout", &HiddenRows::layout);

  nb::class_<Program>(m, "Program")
      .def(nb::init<const std::string&, unsigned, const std::string&, const Program*>(), "isa"_a, "threads"_a, "kv"_a,
           "beside"_a.none() = nb::none())
      .def("buffer", &Program::buffer, "symbol"_a, "width"_a, "prepared"_a)
      .def("prepares", &Program::prepares, "weight"_a)
      .def("angles",
           [](Program& program, Array<const double, 1> inv_freq, double scale) {
             return program.angles(copied(inv_freq), scale);
           },
           "inv_freq"_a.noconvert(), "scale"_a)
      .def("embed", &Program::embed, "table"_a, "out"_a, "partial"_a = false)
      .def("add_norm",
           [](Program& program, int x, std::optional<int> residual, Array<const float, 1> gain, float eps, int out,
              std::optional<int> total) { program.add_norm(x, residual, copied(gain), eps, out, total); },
           "x"_a, "residual"_a.none(), "gain"_a.noconvert(), "eps"_a, "out"_a, "total"_a.none())
      .def("linear", &Program::linear, "x"_a, "weight"_a, "out"_a, "gated"_a = false)
      .def("attend",
           [](Program& program, int qkv, int out, size_t layer, int angles, Numbers numbers,
              const VectorArrays& vectors) {
             program.attend(qkv, attention_of(layer, angles, std::move(numbers), copied_vectors(vectors)), out);
           },
           "qkv"_a, "out"_a, nb::kw_only(), "layer"_a, "angles"_a, "numbers"_a, "vectors"_a.noconvert())
      .def("norm_runs",
           [](Program& program, int x, const std::vector<std::pair<Array<const float, 1>, size_t>>& parts, float eps,
              int out) {
             std::vector<NormedRuns> runs;
             for (const auto& [gain, width] : parts) runs.push_back({copied(gain), width});
             program.norm_runs(x, std::move(runs), eps, out);
           },
           "x"_a, "parts"_a.noconvert(), "eps"_a, "out"_a)
      .def("sparse_act_and_mul", &Program::sparse_act_and_mul, "x"_a, "out"_a, "act"_a, "cutoff"_a)
      .def("gate_columns", &Program::gate_columns, "x"_a, "y"_a, "first"_a, "out"_a, "act"_a)
      .def("take_columns",
           [](Program& program, int x, size_t first, Array<const float, 1> gain, int out) {
             program.take_columns(x, first, copied(gain), out);
           },
           "x"_a, "first"_a, "gain"_a.noconvert(), "out"_a)
      .def("concat", &Program::concat, "x"_a, "y"_a, "out"_a)
      .def("match_rms", &Program::match_rms, "x"_a, "like"_a, "out"_a)
      .def("mix_streams", &Program::mix_streams, "x"_a, "coefficients"_a, "out"_a)
      .def("correct_streams", &Program::correct_streams, "x"_a, "new"_a, "coefficients"_a, "active"_a, "out"_a)
      .def("add_to_streams", &Program::add_to_streams, "x"_a, "y"_a, "out"_a)
      .def("layer_norm_heads",
           [](Program& program, int x, Array<const float, 1> q_gain, Array<const float, 1> k_gain, size_t dim, float eps,
              int out) { program.layer_norm_heads(x, copied(q_gain), copied(k_gain), dim, eps, out); },
           "x"_a, "q_gain"_a.noconvert(), "k_gain"_a.noconvert(), "dim"_a, "eps"_a, "out"_a)
      .def("act_and_mul", &Program::act_and_mul, "x"_a, "out"_a, "act"_a)
      .def("add", &Program::add, "x"_a, "y"_a, "out"_a)
      .def("scale", &Program::scale, "x"_a, "factor"_a, "out"_a)
      .def("soft_cap", &Program::soft_cap, "x"_a, "cap"_a, "out"_a)
      .def("take_sampled", &Program::take_sampled, "x"_a, "out"_a)
      .def("add_layer_norm",
           [](Program& program, int x, std::optional<int> residual, Array<const float, 1> gain,
              Array<const float, 1> bias, float eps, int out, std::optional<int> total) {
             program.add_layer_norm(x, residual, copied(gain), copied(bias), eps, out, total);
           },
           "x"_a, "residual"_a.none(), "gain"_a.noconvert(), "bias"_a.noconvert(), "eps"_a, "out"_a, "total"_a.none())
      .def("activate", &Program::activate, "x"_a, "out"_a, "act"_a)
      .def("embed_positions", &Program::embed_positions, "table"_a, "out"_a)
      .def("sigmoid_mul", &Program::sigmoid_mul, "x"_a, "gate"_a, "out"_a)
      .def("delta_net",
           [](Program& program, int qkv, int z, int beta, int alpha, int mixed, int out, size_t layer, size_t k_heads,
              size_t v_heads, size_t k_dim, size_t v_dim, size_t conv_width, bool tiled, bool channel_decay,
              const std::string& gate, Array<const float, 1> conv, Array<const float, 1> decay,
              Array<const float, 1> dt_bias, Array<const float, 1> gain, float eps) {
             require(gate == "silu" || gate == "sigmoid", "the output of a delta net is gated by silu or sigmoid");
             program.delta_net({qkv, z, beta, alpha},
                               {layer, k_heads, v_heads, k_dim, v_dim, conv_width, tiled, channel_decay,
                                gate == "sigmoid"},
                               {copied(conv), {}}, {copied(decay), copied(dt_bias), copied(gain), eps}, mixed, out);
           },
           "qkv"_a, "z"_a, "beta"_a, "alpha"_a, "mixed"_a, "out"_a, nb::kw_only(), "layer"_a, "k_heads"_a, "v_heads"_a,
           "k_dim"_a, "v_dim"_a, "conv_width"_a, "tiled"_a, "channel_decay"_a, "gate"_a, "conv"_a.noconvert(),
           "decay"_a.noconvert(), "dt_bias"_a.noconvert(), "gain"_a.noconvert(), "eps"_a)
      .def("causal_conv",
           [](Program& program, int x, std::optional<int> product, int out, size_t layer, size_t width,
              size_t conv_width, Array<const float, 1> conv, Array<const float, 1> bias) {
             const ConvShape shape = {.layer = layer, .width = width, .conv_width = conv_width, .offset = 0,
                                      .silu = !product};
             program.causal_conv(x, shape, {copied(conv), copied(bias)}, product, out);
           },
           "x"_a, "product"_a.none(), "out"_a, nb::kw_only(), "layer"_a, "width"_a, "conv_width"_a,
           "conv"_a.noconvert(), "bias"_a.noconvert())
      .def("selective_scan",
           [](Program& program, int x, int dt, int b, int c, int gate, int out, size_t layer, size_t width,
              size_t state_size, Array<const float, 1> decay, Array<const float, 1> skip) {
             program.selective_scan({x, dt, b, c, gate, out}, {layer, width, state_size}, {copied(decay), copied(skip)});
           },
           "x"_a, "dt"_a, "b"_a, "c"_a, "gate"_a, "out"_a, nb::kw_only(), "layer"_a, "width"_a, "state_size"_a,
           "decay"_a.noconvert(), "skip"_a.noconvert())
      .def("mamba2",
           [](Program& program, int zxbcdt, int mixed, int out, size_t layer, size_t heads, size_t head_dim,
              size_t state_dim, size_t groups, size_t conv_width, size_t norm_groups, float z_scale, float dt_scale,
              float dt_min, float dt_max, float eps, Array<const float, 1> conv, Array<const float, 1> conv_bias,
              Array<const float, 1> decay, Array<const float, 1> dt_bias, Array<const float, 1> skip,
              Array<const float, 1> gain) {
             Mamba2Vectors vectors{copied(decay), copied(dt_bias), copied(skip), copied(gain), norm_groups,
                                   eps, z_scale, dt_scale, dt_min, dt_max};
             program.mamba2(zxbcdt, {layer, heads, head_dim, state_dim, groups, conv_width},
                            {copied(conv), copied(conv_bias)}, std::move(vectors), mixed, out);
           },
           "zxbcdt"_a, "mixed"_a, "out"_a, nb::kw_only(), "layer"_a, "heads"_a, "head_dim"_a, "state_dim"_a, "groups"_a,
           "conv_width"_a, "norm_groups"_a, "z_scale"_a, "dt_scale"_a, "dt_min"_a, "dt_max"_a, "eps"_a,
           "conv"_a.noconvert(), "conv_bias"_a.noconvert(), "decay"_a.noconvert(), "dt_bias"_a.noconvert(),
           "skip"_a.noconvert(), "gain"_a.noconvert())
      .def("moe",
           [](Program& program, int x, int router_logits, std::vector<std::shared_ptr<const Weight>> up,
              std::vector<std::shared_ptr<const Weight>> down, Array<const float, 1> choice_bias, int out, size_t top_k,
              const std::string& act, const std::string& scoring, bool renormalize, float scale, size_t groups,
              size_t top_k_groups, const std::string& group_score, bool weigh_inputs,
              const std::optional<Array<const float, 1>>& expert_scale) {
             const Routing routing = {up.size(), top_k, scoring_of(scoring), renormalize, scale, groups, top_k_groups,
                                      group_score == "top2", copied(choice_bias), weigh_inputs,
                                      expert_scale ? copied(*expert_scale) : std::vector<float>()};
             program.moe(x, router_logits, {std::move(up), std::move(down)}, routing, act, out);
           },
           "x"_a, "router_logits"_a, "up"_a, "down"_a, "choice_bias"_a.noconvert(), "out"_a, nb::kw_only(), "top_k"_a,
           "act"_a,
           "scoring"_a, "renormalize"_a, "scale"_a, "groups"_a, "top_k_groups"_a, "group_score"_a,
           "weigh_inputs"_a = false, "expert_scale"_a.none() = nb::none())
      .def("per_head_linear", &Program::per_head_linear, "x"_a, "weight"_a, "heads"_a, "passthrough"_a, "out"_a)
      .def("attend_mla",
           [](Program& program, int q, int kv, std::optional<int> selected, int out, size_t layer, int angles,
              Numbers numbers, const VectorArrays& vectors) {
             const Attention attention = attention_of(layer, angles, std::move(numbers), copied_vectors(vectors));
             program.attend_mla(q, kv, selected, attention, out);
           },
           "q"_a, "kv"_a, "selected"_a.none(), "out"_a, nb::kw_only(), "layer"_a, "angles"_a, "numbers"_a,
           "vectors"_a.noconvert())
      .def("select_positions",
           [](Program& program, int q, int k, int weights, int out, size_t layer, int angles, bool interleaved,
              size_t heads, size_t head_dim, size_t top_k, Numbers numbers) {
             const Attention attention = attention_of(layer, angles, std::move(numbers), {});
             const Index index = {layer, heads, head_dim, top_k, angles, interleaved};
             program.select_positions(q, k, weights, index, attention.shape(), out);
           },
           "q"_a, "k"_a, "weights"_a, "out"_a, nb::kw_only(), "layer"_a, "angles"_a, "interleaved"_a, "heads"_a,
           "head_dim"_a, "top_k"_a, "numbers"_a)
      .def("store_hidden", &Program::store_hidden, "number"_a, "x"_a, "ahead"_a)
      .def("load_hidden", &Program::load_hidden, "number"_a, "out"_a)
      .def("keep", &Program::keep, "buffer"_a)
      .def("answer", &Program::answer, "buffer"_a)
      .def("read_tokens_as", &Program::read_tokens_as, "ids"_a)
      .def("reserve_kv", &Program::reserve_kv, "blocks"_a, "block_size"_a, "states"_a = 0,
           "groups"_a = LayerGroups(), "file"_a.none() = nb::none())
      .def("take_over", &Program::take_over, "other"_a)
      .def("move_states",
           [](Program& program, const std::vector<std::tuple<size_t, int32_t, int32_t, int32_t>>& rows) {
             std::vector<StateMove> moves;
             for (const auto& [row, begin, save, after] : rows) moves.push_back({row, begin, save, after});
             program.move_states(std::move(moves));
           },
           "moves"_a)
      .def("load_adapter", &Program::load_adapter, "slot"_a, "adapter"_a)
      .def("drop_adapter", &Program::drop_adapter, "slot"_a)
      .def("choose_adapters",
           [](Program& program, IntArray slots) { program.choose_adapters(copied(slots)); }, "slots"_a.noconvert())
      .def("copy_blocks", &Program::copy_blocks, "pairs"_a)
      .def("export_blocks", export_blocks<Program>, "blocks"_a)
      .def("import_blocks", import_blocks<Program>, "blocks"_a, "data"_a)
      .def("copy_out", copy_out<Program>, "blocks"_a, "rows"_a.noconvert(), "places"_a, "offset"_a, "crcs"_a)
      .def("copy_in", copy_in<Program>, "blocks"_a, "rows"_a.noconvert(), "places"_a, "offset"_a, "crcs"_a)
      .def("export_states", export_states, "states"_a)
      .def("import_states", import_states, "states"_a, "data"_a)
      .def("run", run, "tokens"_a.noconvert(), "positions"_a.noconvert(), "row_start"_a.noconvert(),
           "slots"_a.noconvert(), "tables"_a.noconvert(), "sampled"_a.noconvert(), "out"_a.noconvert())
      .def("sample", sample, "tokens"_a.noconvert(), "positions"_a.noconvert(), "row_start"_a.noconvert(),
           "slots"_a.noconvert(), "tables"_a.noconvert(), "sampled"_a.noconvert(), "target"_a.noconvert(), "temperature"_a.noconvert(),
           "top_p"_a.noconvert(), "top_k"_a.noconvert(), "min_p"_a.noconvert(), "seed"_a.noconvert(),
           "logprobs"_a.noconvert(), "edits"_a.noconvert(), "constrained"_a.noconvert(), "words"_a.noconvert())
      .def("read_answers",
           [](Program& program, IntArray rows, Array<float, 2> out) { program.read_answers(flat(rows), flat(out)); },
           "rows"_a.noconvert(), "out"_a.noconvert())
      .def("read_kept",
           [](Program& program, size_t first, Array<float, 2> out) { program.read_kept(first, flat(out)); }, "first"_a,
           "out"_a.noconvert())
      .def_prop_ro("hidden", &Program::hidden)
      .def_prop_ro("isa", &Program::isa)
      .def_prop_ro("threads", &Program::threads)
      .def_prop_ro("kv_bytes_per_token", &Program::kv_bytes_per_token)
      .def_prop_ro("block_bytes", &Program::block_bytes)
      .def_prop_ro("kv_layout", &Program::kv_layout)
      .def_prop_ro("state_bytes", &Program::state_bytes)
      .def_prop_ro("state_layout", &Program::state_layout);

  m.def("quantize", quantize_values, "source"_a, "values"_a.noconvert(), "target"_a, "out"_a.noconvert(), "threads"_a,
        "isa"_a = "auto");
}
