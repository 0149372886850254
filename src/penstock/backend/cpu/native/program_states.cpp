// The part of Program that deals with recurrent states.
#include <cmath>
#include <utility>

#include "program.h"
#include "require.h"

namespace penstock {

void Program::sigmoid_mul(int x, int gate, int out) {
  const Buffer& to = at(out);
  at(x, to.symbol, to.width);
  const size_t gates = at(gate).width;
  require(at(gate).symbol == to.symbol && (gates == 1 || gates == to.width), "a gate is one value, or as wide as its rows");
  each_row(out, [=](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    const float *values = frame.buffers[size_t(x)].row(r), *gate_row = frame.buffers[size_t(gate)].row(r);
    if (gates == to.width) return frame.kernels.delta.gate_by(values, gate_row, to.width, to.row(r));
    if (x != out) std::copy_n(values, to.width, to.row(r));
    frame.kernels.scale(to.row(r), to.width, 1.0f / (1.0f + std::exp(-gate_row[0])));
  });
}

void Program::delta_net(const DeltaBuffers& given, const DeltaShape& shape, ConvVectors conv, DeltaVectors vectors,
                        int mixed, int out) {
  require(shape.k_heads && shape.v_heads <= 65536 && shape.v_heads && shape.v_heads % shape.k_heads == 0,
          "a delta net needs a multiple of its key heads as value heads");
  require(shape.k_dim && shape.v_dim && shape.k_dim <= 65536 && shape.v_dim <= 65536, "a head has 1 to 65536 values");
  check(shape.conv(), conv);
  require(vectors.decay.size() == shape.v_heads && vectors.dt.size() == shape.v_heads * shape.decays() &&
              vectors.gain.size() == shape.v_dim,
          "a vector of a delta net has another size than its shape says");
  const auto first = [&](int buffer, size_t width) {
    require(at(buffer).symbol == Symbol::T && at(buffer).width >= width, "a buffer is too narrow for a delta net");
    return Columns{buffer, 0};
  };
  const auto last = [&](int buffer, size_t width) {
    return Columns{first(buffer, width).buffer, at(buffer).width - width};
  };
  const DeltaInputs inputs = {first(given.qkv, shape.width()).buffer, last(given.z, shape.v_width()),
                              first(given.beta, shape.v_heads), last(given.alpha, shape.v_heads * shape.decays())};
  at(mixed, Symbol::T, shape.width());
  at(out, Symbol::T, shape.v_width());
  states_.add_layer(shape.layer, shape.state_floats());
  scratch_floats_ = std::max(scratch_floats_, shape.scratch_floats());
  const auto shared = std::make_shared<const DeltaVectors>(std::move(vectors));
  const auto taps = std::make_shared<const ConvVectors>(std::move(conv));
  phases_.push_back(convolve_phase(shape.conv(), taps, given.qkv, mixed));
  phases_.push_back(delta_rule_phase(shape, shared, inputs, mixed, out));
  prepare_rows(out);
}

void Program::mamba2(int zxbcdt, const Mamba2Shape& shape, ConvVectors conv, Mamba2Vectors vectors, int mixed, int out) {
  require(shape.groups && shape.heads && shape.heads <= 65536 && shape.heads % shape.groups == 0,
          "Mamba2 needs a multiple of its groups as heads");
  require(shape.head_dim && shape.state_dim && shape.head_dim <= 65536 && shape.state_dim <= 65536,
          "a head and its state have 1 to 65536 values");
  check(shape.conv(), conv);
  require(vectors.decay.size() == shape.heads && vectors.dt_bias.size() == shape.heads &&
              vectors.skip.size() == shape.heads && (vectors.gain.empty() || vectors.gain.size() == shape.inner()),
          "a vector of Mamba2 has another size than its shape says");
  require(vectors.norm_groups && shape.inner() % vectors.norm_groups == 0, "a norm's groups divide its width");
  require(vectors.dt_min <= vectors.dt_max, "the least time step is not above the greatest");
  at(zxbcdt, Symbol::T, shape.in_width());
  at(mixed, Symbol::T, shape.width());
  at(out, Symbol::T, shape.inner());
  states_.add_layer(shape.layer, shape.state_floats());
  scratch_floats_ = std::max(scratch_floats_, shape.scratch_floats());
  const auto shared = std::make_shared<const Mamba2Vectors>(std::move(vectors));
  phases_.push_back(
      convolve_phase(shape.conv(), std::make_shared<const ConvVectors>(std::move(conv)), zxbcdt, mixed));
  phases_.push_back(selective_scan_phase(shape, shared, zxbcdt, mixed, out));
  each_row(out, [=](const Frame& frame, size_t token) { gate_and_norm(frame, shape, *shared, zxbcdt, out, token); });
}

void Program::move_states(std::vector<StateMove> moves) {
  const std::lock_guard lock(running_);
  moves_ = std::move(moves);
}

void Program::export_states(Blocks states, std::span<std::byte> out) {
  const std::lock_guard lock(running_);
  states_.export_states(states, out);
}

void Program::import_states(Blocks states, std::span<const std::byte> data) {
  const std::lock_guard lock(running_);
  states_.import_states(states, data);
}

void Program::find_states(const Step& step) {
  const auto moves = std::exchange(moves_, {});
  auto& rows = frame_.row_states;
  rows.clear();
  if (!states_.layers()) return;
  const auto exists = [&](int32_t state) { return state >= 0 && size_t(state) < states_.count(); };
  for (int32_t slot : step.slots) {
    require(exists(slot), "slot " + std::to_string(slot) + " has no state: there are " + std::to_string(states_.count()));
    rows.push_back({.begin = slot, .own = slot});
  }
  for (const StateMove& move : moves) {
    require(move.row < rows.size(), "a state is moved for a row that is not there");
    RowState& row = rows[move.row];
    const int32_t tokens = step.row_start[move.row + 1] - step.row_start[move.row];
    require(move.begin == NO_STATE || exists(move.begin), "there is no state " + std::to_string(move.begin));
    require(move.save == NO_STATE || (exists(move.save) && move.after >= 1 && move.after <= tokens),
            "a state is saved after 1 or more of a row's tokens, to one that is there");
    if (move.begin != NO_STATE) row.begin = move.begin;
    row.save = move.save;
    row.after = move.after;
  }
  for (size_t row = 0; row < rows.size(); ++row)
    if (const auto first = size_t(step.row_start[row]); first < step.positions.size() && step.positions[first] == 0)
      rows[row].begin = NO_STATE;
}

}  // namespace penstock
