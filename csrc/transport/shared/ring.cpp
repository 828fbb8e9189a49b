#include "transport/shared/ring.h"

namespace zero3 {

void Ring::grow(uint64_t capacity) {
  for (auto& turn : turns_) turn->is_over = true;
  turns_.clear();
  capacity_ = capacity;
  cursor_ = 0;
}

std::shared_ptr<Ring::Turn> Ring::next(uint64_t nbytes, bool even_if_pinned) {
  nbytes = in_cache_lines(nbytes);
  const uint64_t begin = cursor_ + nbytes <= std::min(capacity_, admitted_) ? cursor_ : 0;
  const uint64_t end = begin + nbytes;
  const auto in_its_place = [&](const std::shared_ptr<Turn>& turn) {
    return turn->begin < end && begin < turn->end;
  };
  for (auto& turn : turns_)
    if (in_its_place(turn) && turn->pins > 0 && !even_if_pinned) return nullptr;
  for (auto& turn : turns_) {
    if (!in_its_place(turn)) continue;
    if (turn->leave) turn->leave();
    turn->is_over = true;
  }
  std::erase_if(turns_, in_its_place);
  cursor_ = end;
  history_ = (history_ ^ nbytes) * 0x9e3779b97f4a7c15u + 1;
  auto turn = std::make_shared<Turn>();
  turn->begin = begin;
  turn->end = end;
  turn->history = history_;
  return turns_.emplace_back(std::move(turn));
}

std::optional<uint64_t> Arena::take(uint64_t nbytes) {
  nbytes = in_cache_lines(nbytes);
  uint64_t begin = 0;
  for (auto& [first, last] : taken_) {
    if (first - begin >= nbytes) break;
    begin = last;
  }
  // If no hole fits, `begin` is the start of the free rest behind the last block.
  if (begin + nbytes > capacity_) return std::nullopt;
  taken_[begin] = begin + nbytes;
  return begin;
}

}  // namespace zero3
