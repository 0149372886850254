#include "suffixes.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

namespace penstock {

namespace {

constexpr size_t FIRST_TABLE = 64;
constexpr int REFRESHED = 4;  // suffixes of the text whose latest occurrence is kept current at every token

}  // namespace

SuffixAutomaton::SuffixAutomaton(size_t capacity) : capacity_(capacity) {
  if (capacity == 0 || capacity > size_t(1) << 29) throw std::invalid_argument("a capacity is 1 to 2^29 tokens");
  clear();
}

void SuffixAutomaton::clear() {
  text_.clear();
  states_.clear();
  transitions_.clear();
  table_.assign(FIRST_TABLE, NONE);
  last_ = add_state(0, 0);
}

void SuffixAutomaton::extend(std::span<const int32_t> tokens) {
  if (text_.size() + tokens.size() > capacity_) {
    clear();
    ++epoch_;
    if (tokens.size() > capacity_) tokens = tokens.last(capacity_);
  }
  for (int32_t token : tokens) append(token);
}

size_t SuffixAutomaton::bytes() const {
  return text_.capacity() * sizeof(int32_t) + states_.capacity() * sizeof(State) +
         transitions_.capacity() * sizeof(Transition) + table_.capacity() * sizeof(int32_t);
}

int32_t SuffixAutomaton::add_state(int32_t length, int32_t end) {
  states_.push_back({length, NONE, end, NONE, NONE, NONE, false});
  return int32_t(states_.size() - 1);
}

size_t SuffixAutomaton::slot(int32_t state, int32_t token) const {
  uint64_t key = (uint64_t(uint32_t(state)) << 32 | uint32_t(token)) * 0x9E3779B97F4A7C15u;
  return size_t(key >> 32) & (table_.size() - 1);
}

int32_t* SuffixAutomaton::find(int32_t state, int32_t token) {
  State& from = states_[state];
  if (from.target == NONE) return nullptr;
  if (from.token == token) return &from.target;
  if (from.more == NONE) return nullptr;
  for (size_t at = slot(state, token); table_[at] != NONE; at = (at + 1) & (table_.size() - 1)) {
    Transition& found = transitions_[table_[at]];
    if (found.state == state && found.token == token) return &found.target;
  }
  return nullptr;
}

int32_t SuffixAutomaton::target(int32_t state, int32_t token) const {
  const int32_t* found = const_cast<SuffixAutomaton*>(this)->find(state, token);
  return found ? *found : NONE;
}

void SuffixAutomaton::add_transition(int32_t state, int32_t token, int32_t target) {
  State& from = states_[state];
  if (from.target == NONE) {
    from.token = token;
    from.target = target;
    return;
  }
  if (2 * (transitions_.size() + 1) > table_.size()) grow_table();
  size_t at = slot(state, token);
  while (table_[at] != NONE) at = (at + 1) & (table_.size() - 1);
  table_[at] = int32_t(transitions_.size());
  transitions_.push_back({state, token, target, from.more});
  from.more = table_[at];
}

void SuffixAutomaton::grow_table() {
  table_.assign(2 * table_.size(), NONE);
  for (size_t i = 0; i < transitions_.size(); ++i) {
    size_t at = slot(transitions_[i].state, transitions_[i].token);
    while (table_[at] != NONE) at = (at + 1) & (table_.size() - 1);
    table_[at] = int32_t(i);
  }
}

// Keeps the latest end of the longest suffixes that occurred before. It runs before a token is appended, because until
// then the end that counts is the one before.
void SuffixAutomaton::refresh() {
  int32_t state = states_[last_].link;
  for (int i = 0; i < REFRESHED && state > 0; ++i, state = states_[state].link) {
    states_[state].end = int32_t(text_.size());
    states_[state].repeated = true;
  }
}

void SuffixAutomaton::append(int32_t token) {
  refresh();
  text_.push_back(token);
  const int32_t added = add_state(states_[last_].length + 1, int32_t(text_.size()));
  int32_t state = last_;
  while (state != NONE && !find(state, token)) {
    add_transition(state, token, added);
    state = states_[state].link;
  }
  last_ = added;
  states_[added].link = state == NONE ? 0 : split(state, target(state, token), token);
}

// Returns the state of the longest string that leads from `before` by the token. That is `state` unless it has longer
// strings, which are then told apart.
int32_t SuffixAutomaton::split(int32_t before, int32_t state, int32_t token) {
  const int32_t length = states_[before].length + 1;
  if (states_[state].length == length) return state;
  const int32_t clone = add_state(length, states_[state].end);
  states_[clone].link = states_[state].link;
  states_[clone].token = states_[state].token;
  states_[clone].target = states_[state].target;
  states_[clone].repeated = states_[state].repeated;
  for (int32_t at = states_[state].more; at != NONE; at = transitions_[at].next) {
    const Transition copied = transitions_[at];
    add_transition(clone, copied.token, copied.target);
  }
  states_[state].link = clone;
  for (int32_t* found; before != NONE && (found = find(before, token)) && *found == state;
       before = states_[before].link)
    *found = clone;
  return clone;
}

Continuation SuffixAutomaton::continuation(size_t most) const {
  const int32_t match = states_[last_].link;
  return match > 0 ? followers(match, size_t(states_[match].length), most) : Continuation();
}

Continuation SuffixAutomaton::followers(int32_t state, size_t length, size_t most) const {
  const size_t end = size_t(states_[state].end), period = text_.size() - end;
  std::vector<int32_t> tokens;
  std::vector<int> agreements;
  for (size_t i = 0; i < most; ++i) {
    const int32_t token = i < period ? text_[end + i] : tokens[i - period];
    if (token < 0) break;
    const bool known = state != NONE && states_[state].target != NONE;
    agreements.push_back(!known || (states_[state].more == NONE && !states_[state].repeated) ? SINGLE
                         : states_[state].more == NONE                                     ? ALIKE
                                                                                           : DIFFERENT);
    tokens.push_back(token);
    state = known ? target(state, token) : NONE;
  }
  return {std::move(tokens), length, std::move(agreements)};
}

// Goes back to the beginning where the text has started anew, and to the shorter state where one has been split since.
void SuffixCursor::settle() {
  if (epoch_ != automaton_->epoch_) {
    epoch_ = automaton_->epoch_;
    state_ = length_ = 0;
  }
  const auto& states = automaton_->states_;
  while (state_ && states[states[state_].link].length >= length_) state_ = states[state_].link;
}

void SuffixCursor::advance(std::span<const int32_t> tokens) {
  for (int32_t token : tokens) {
    settle();
    int32_t next;
    while ((next = automaton_->target(state_, token)) == SuffixAutomaton::NONE && state_) {
      state_ = automaton_->states_[state_].link;
      length_ = automaton_->states_[state_].length;
    }
    if (next != SuffixAutomaton::NONE) {
      state_ = next;
      ++length_;
    }
  }
}

Continuation SuffixCursor::continuation(size_t most) {
  settle();
  const auto& [states, text] = std::tie(automaton_->states_, automaton_->text_);
  int32_t state = state_;
  while (state && size_t(states[state].end) == text.size()) state = states[state].link;
  if (!state) return {};
  const size_t left = text.size() - size_t(states[state].end);
  return automaton_->followers(state, size_t(std::min(length_, states[state].length)), std::min(most, left));
}

}  // namespace penstock
