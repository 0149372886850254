// The part of Program that deals with parts of rows: columns, gates that are cut off, and residual streams.
#include <algorithm>
#include <cmath>
#include <utility>

#include "program.h"
#include "require.h"

namespace penstock {

namespace {

constexpr float LEAST_SQUARE = 1e-5f;  // mean square of a scaled stream, at least

}  // namespace

// A row of streams is much work for one worker, so its streams are divided too.
void Program::each_run(int out, size_t runs, std::function<void(const Frame&, size_t row, size_t run)> run) {
  phases_.push_back({[=](const Frame& frame) { return frame.rows(out) * runs; },
                     [=, run = std::move(run)](const Frame& frame, size_t chunk, unsigned) {
                       run(frame, chunk / runs, chunk % runs);
                     }});
  prepare_rows(out);
}

void Program::sparse_act_and_mul(int x, int out, const std::string& act, float cutoff) {
  const Buffer& to = at(out);
  at(x, to.symbol, 2 * to.width);
  each_row(out, [=, activate = activation_of(act)](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    const float* row = frame.buffers[size_t(x)].row(r);
    frame.kernels.streams.cut_off(row, to.width, cutoff, to.row(r));
    activate(to.row(r), to.width, to.row(r));
    frame.kernels.mamba.multiply(to.row(r), row + to.width, to.width, to.row(r));
  });
}

void Program::gate_columns(int x, int y, size_t first, int out, const std::string& act) {
  const Buffer& to = at(out);
  at(x, to.symbol, to.width);
  require(at(y).symbol == to.symbol && first + to.width <= at(y).width, "these columns are not there");
  each_row(out, [=, activate = activation_of(act)](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    activate(frame.buffers[size_t(x)].row(r), to.width, to.row(r));
    frame.kernels.mamba.multiply(to.row(r), frame.buffers[size_t(y)].row(r) + first, to.width, to.row(r));
  });
}

void Program::take_columns(int x, size_t first, std::vector<float> gain, int out) {
  const Buffer& to = at(out);
  require(at(x).symbol == to.symbol && first + to.width <= at(x).width, "these columns are not there");
  require(gain.empty() || gain.size() == to.width, "every column needs a gain");
  each_row(out, [=, gain = std::move(gain)](const Frame& frame, size_t r) {
    const Buffer& to = frame.buffers[size_t(out)];
    const float* from = frame.buffers[size_t(x)].row(r) + first;
    if (gain.empty())
      std::copy_n(from, to.width, to.row(r));
    else
      frame.kernels.mamba.multiply(from, gain.data(), to.width, to.row(r));
  });
}

void Program::concat(int x, int y, int out) {
  const Buffer& to = at(out);
  require(at(x).symbol == to.symbol && at(y).symbol == to.symbol && at(x).width + at(y).width == to.width,
          "rows side by side are as wide as both");
  each_row(out, [=](const Frame& frame, size_t r) {
    const Buffer &left = frame.buffers[size_t(x)], &right = frame.buffers[size_t(y)];
    float* to = frame.buffers[size_t(out)].row(r);
    std::copy_n(right.row(r), right.width, std::copy_n(left.row(r), left.width, to));
  });
}

void Program::match_rms(int x, int like, int out) {
  const size_t width = at(like).width, runs = at(x).width / width;
  require(runs && at(x).width == runs * width, "streams are as wide as what they are scaled to");
  at(x, at(like).symbol, runs * width);
  at(out, at(like).symbol, runs * width);
  each_run(out, runs, [=](const Frame& frame, size_t r, size_t run) {
    const float* from = frame.buffers[size_t(x)].row(r) + run * width;
    float* to = frame.buffers[size_t(out)].row(r) + run * width;
    const auto& kernels = frame.kernels;
    const float wanted = kernels.streams.mean_square(frame.buffers[size_t(like)].row(r), width);
    const float found = std::max(kernels.streams.mean_square(from, width), LEAST_SQUARE);
    if (from != to) std::copy_n(from, width, to);
    kernels.scale(to, width, std::sqrt(wanted / found));
  });
}

void Program::mix_streams(int x, int coefficients, int out) {
  const Buffer& from = at(x);
  const auto streams = size_t(std::lround(std::sqrt(double(at(coefficients).width))));
  require(streams && from.width % streams == 0, "streams are equally wide");
  at(coefficients, from.symbol, streams * streams);
  at(out, from.symbol, from.width);
  require(out != x && out != coefficients, "streams cannot be mixed in the buffer that they are read from");
  const size_t width = from.width / streams;
  each_run(out, streams, [=](const Frame& frame, size_t r, size_t stream) {
    const float* row = frame.buffers[size_t(x)].row(r);
    const float* factors = frame.buffers[size_t(coefficients)].row(r) + stream * streams;
    float* to = frame.buffers[size_t(out)].row(r) + stream * width;
    std::copy_n(row + stream * width, width, to);
    for (size_t i = 0; i < streams; ++i) frame.kernels.streams.add_scaled(row + i * width, width, factors[i], to);
  });
}

void Program::correct_streams(int x, int fresh, int coefficients, size_t active, int out) {
  const Buffer& from = at(x);
  const size_t width = at(fresh).width, streams = at(coefficients).width;
  require(active < streams, "there is no such stream");
  at(x, from.symbol, streams * width);
  at(fresh, from.symbol, width);
  at(coefficients, from.symbol, streams);
  at(out, from.symbol, from.width);
  require(out != x && out != fresh, "streams cannot be corrected in the buffer that they are read from");
  each_run(out, streams, [=](const Frame& frame, size_t r, size_t stream) {
    const float* row = frame.buffers[size_t(x)].row(r);
    float* to = frame.buffers[size_t(out)].row(r) + stream * width;
    const float factor = 1.0f + frame.buffers[size_t(coefficients)].row(r)[stream];
    std::copy_n(row + stream * width, width, to);
    frame.kernels.streams.add_scaled(frame.buffers[size_t(fresh)].row(r), width, factor, to);
    frame.kernels.streams.add_scaled(row + active * width, width, -factor, to);
  });
}

void Program::add_to_streams(int x, int y, int out) {
  const Buffer& from = at(x);
  const size_t width = at(y).width, streams = from.width / width;
  require(streams && from.width == streams * width, "streams are equally wide");
  at(y, from.symbol, width);
  at(out, from.symbol, from.width);
  each_run(out, streams, [=](const Frame& frame, size_t r, size_t stream) {
    const float* old = frame.buffers[size_t(x)].row(r) + stream * width;
    float* to = frame.buffers[size_t(out)].row(r) + stream * width;
    if (old != to) std::copy_n(old, width, to);
    if (stream) frame.kernels.streams.add_scaled(frame.buffers[size_t(y)].row(r), width, 1.0f, to);
  });
}

}  // namespace penstock
