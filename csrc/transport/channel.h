// The ranks of a process group, and the exchanges between them.
//
//   gather       rows [n], one for each rank, with this rank's written  ->  all rows written
//   reduce       rows [n], one for each rank         ->  this rank's from every rank, or their sum
//   all_to_all   rows [n], one for each rank         ->  this rank's from every rank
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/rank_names.h"

namespace zero3 {

// Contiguous tensors [n], one for each rank. Unless the channel is point to point, all n are equal,
// or all but that of one rank are zero.
using Rows = std::vector<at::Tensor>;

// The rank with the only row of several that is not empty; nullopt if there is no such row.
std::optional<int64_t> root_of(const Rows& rows);

constexpr int64_t kWorthAMessage = 64 << 10;  // bytes; smaller tensors share a message

// Gathers and reductions that start one by one and are waited for together. All ranks start the
// exchanges of a channel in one order. A `key` is the same on all ranks. Tensors of different keys
// never meet: each waits for tensors of its own key.
class Exchange {
 public:
  virtual ~Exchange() = default;

  struct Piece {
    Rows rows;  // of one run of memory, or of one rank alone; others must not read before wait()
    std::string key;
  };

  // Gathers several pieces at once, in one collective if the channel is grouped. Rows of one rank
  // alone take a broadcast for each piece.
  virtual void gather(const std::vector<Piece>& pieces) = 0;

  // Until wait(), only the backend reads or writes `rows`.
  virtual void reduce(const Rows& rows, const std::string& key) = 0;

  // Like reduce(), but the backend sums nothing.
  virtual void all_to_all(const Rows& rows, const std::string& key) = 0;

  // Raises, naming the key, if another rank does not take part in time.
  virtual void wait() = 0;

  // After wait(): for each call of reduce() or all_to_all(), the tensors [n] to sum, in the order
  // of ranks.
  const std::vector<Rows>& addends() const { return addends_; }

 protected:
  std::vector<Rows> addends_;
};

class Channel {
 public:
  struct Traits {
    bool is_point_to_point;  // sends and receives each tensor by itself: none need share a message
    bool is_grouped;         // one collective gathers several tensors, each in place
    bool carries_data;
    bool ends_on_host;  // work ends when the host sees it end, and not on a stream of a device
  };
  // Traits of a c10d backend.
  static Traits traits_of(const std::string& backend, bool on_cpu, bool carries_data);

  Channel(std::string name, int64_t rank, int64_t world_size, Traits traits, RankNames names = {})
      : name(std::move(name)),
        rank(rank),
        world_size(world_size),
        traits(traits),
        rank_names(std::move(names)) {}
  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  virtual std::unique_ptr<Exchange> exchange() const = 0;

  const std::string name;  // name of the process group
  const int64_t rank;
  const int64_t world_size;
  const Traits traits;
  const RankNames rank_names;
};

// An exchange of a rank that is alone: nothing moves.
std::unique_ptr<Exchange> exchange_of_one();

// Concatenates `rows`. Copies nothing if they are adjacent already.
at::Tensor one_run(const Rows& rows);

// Whether both channels connect the same ranks, or both are null.
inline bool is_same(const Channel* one, const Channel* other) {
  return one == other || (one && other && one->name == other->name);
}

}  // namespace zero3
