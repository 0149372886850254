// A suffix automaton of a token stream that grows: finds where the end of a stream occurred before, and what followed.
// core/drafting/suffixes.py defines it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

namespace penstock {

// Agreement at a token: what stands before it occurred with different followers, once, or more often with the same.
enum Agreement { DIFFERENT, SINGLE, ALIKE };

// What followed an earlier occurrence, how many tokens before it match, and the agreement at each token.
using Continuation = std::tuple<std::vector<int32_t>, size_t, std::vector<int>>;

class SuffixAutomaton {
 public:
  explicit SuffixAutomaton(size_t capacity);

  // Appends tokens. A text that would become longer than the capacity starts anew, with none of the older tokens.
  void extend(std::span<const int32_t> tokens);

  // What followed the latest known earlier occurrence of the longest suffix that has one. If that runs into the end of
  // the text, it continues periodically. A negative token ends it.
  Continuation continuation(size_t most) const;

  size_t size() const { return text_.size(); }
  size_t bytes() const;

 private:
  friend class SuffixCursor;
  static constexpr int32_t NONE = -1;

  struct State {
    int32_t length, link, end;  // its longest string: tokens, state of its next shorter suffix, end
    int32_t token, target;      // the first transition; most states have no other
    int32_t more;               // the last of the other transitions
    bool repeated;              // it is known to have occurred more than once
  };
  struct Transition {
    int32_t state, token, target, next;
  };

  void clear();
  void append(int32_t token);
  int32_t add_state(int32_t length, int32_t end);
  int32_t* find(int32_t state, int32_t token);
  int32_t target(int32_t state, int32_t token) const;
  void add_transition(int32_t state, int32_t token, int32_t target);
  void grow_table();
  size_t slot(int32_t state, int32_t token) const;
  int32_t split(int32_t before, int32_t state, int32_t token);
  void refresh();
  Continuation followers(int32_t state, size_t length, size_t most) const;

  size_t capacity_;
  uint64_t epoch_ = 0;  // how often the text has started anew
  int32_t last_ = 0;
  std::vector<int32_t> text_;
  std::vector<State> states_;
  std::vector<Transition> transitions_;
  std::vector<int32_t> table_;  // open addressing by (state, token): an index of transitions_, or NONE
};

// Follows another stream through an automaton: the longest suffix of it that occurs in the automaton's text.
class SuffixCursor {
 public:
  explicit SuffixCursor(const SuffixAutomaton& automaton) : automaton_(&automaton), epoch_(automaton.epoch_) {}

  void advance(std::span<const int32_t> tokens);
  Continuation continuation(size_t most);

 private:
  void settle();

  const SuffixAutomaton* automaton_;
  uint64_t epoch_;
  int32_t state_ = 0;
  int32_t length_ = 0;
};

}  // namespace penstock
