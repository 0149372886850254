// Ops of models with layer norms: the norm, activations that gate nothing, positions that are learned.
#include <algorithm>

#include "program.h"
#include "require.h"

namespace penstock {

Activation Program::activation_of(const std::string& act) const {
  const std::pair<const char*, Activation> activations[] = {
      {"silu", isa_.kernels->silu},
      {"gelu", isa_.kernels->gelu},
      {"gelu_tanh", isa_.kernels->gelu_tanh},
      {"relu", isa_.kernels->relu},
      {"relu2", isa_.kernels->relu2}};
  for (const auto& [name, activation] : activations)
    if (act == name) return activation;
  throw std::invalid_argument("no activation " + act);
}

void Program::add_layer_norm(int x, std::optional<int> residual, std::vector<float> gain, std::vector<float> bias,
                             float eps, int out, std::optional<int> total) {
  const Buffer& from = at(x);
  at(out, from.symbol, from.width);
  require(gain.size() == from.width && bias.size() == from.width, "a norm has one gain and one bias for each value");
  require(residual.has_value() == total.has_value(), "a residual is added to give a total");
  require(out != x && (!total || (out != *total && out != *residual)), "a norm cannot write to a buffer that it reads");
  for (const auto& buffer : {residual, total})
    if (buffer) at(*buffer, from.symbol, from.width);
  each_row(out, [=, gain = std::move(gain), bias = std::move(bias)](const Frame& frame, size_t r) {
    const auto row = [&](int buffer) { return frame.buffers[size_t(buffer)].row(r); };
    frame.kernels.add_layer_norm(row(x), residual ? row(*residual) : nullptr, gain.data(), bias.data(), eps,
                                 gain.size(), total ? row(*total) : nullptr, row(out));
  });
  if (total) prepare_rows(*total);
}

void Program::layer_norm_heads(int x, std::vector<float> q_gain, const std::vector<float>& k_gain, size_t dim, float eps,
                               int out) {
  const Buffer& from = at(x);
  std::vector<float> gain = std::move(q_gain);
  gain.insert(gain.end(), k_gain.begin(), k_gain.end());
  require(gain.size() % dim == 0 && gain.size() <= from.width, "q and k have a gain for each value of each head");
  each_row(out, [=, gain = std::move(gain), bias = std::vector<float>(dim)](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    const float* row = frame.buffers[size_t(x)].row(r);
    for (size_t i = 0; i < gain.size(); i += dim)
      frame.kernels.add_layer_norm(row + i, nullptr, gain.data() + i, bias.data(), eps, dim, nullptr, to.row(r) + i);
    if (x != out) std::copy(row + gain.size(), row + to.width, to.row(r) + gain.size());
  });
}

void Program::activate(int x, int out, const std::string& act) {
  const Buffer& to = at(out);
  at(x, to.symbol, to.width);
  each_row(out, [x, out, activate = activation_of(act)](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    activate(frame.buffers[size_t(x)].row(r), to.width, to.row(r));
  });
}

void Program::embed_positions(std::shared_ptr<const Weight> table, int out) {
  at(out, Symbol::T, table->width());
  require_panels(*table);
  positions_ = positions_ ? std::min(positions_, table->rows()) : table->rows();
  each_row(out, [table, out](const Frame& frame, size_t r) {
    table->read_row(size_t(frame.batch.positions[r]), frame.buffers[size_t(out)].row(r));
  });
}

}  // namespace penstock
