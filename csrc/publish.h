// Gathers of ranks that share memory: one copy of each parameter, which all ranks read, and of
// which each writes its rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "gather.h"
#include "mailbox.h"
#include "one_host.h"

namespace zero3 {

class Roll;

// The ranks of a process group that live on one host.
struct OneHost {
  // `control` is zeros, shared: a Bell, and a Standing for each rank.
  OneHost(const std::string& group_name, int64_t rank, const std::vector<int64_t>& pids,
          at::Tensor control);

  static int64_t control_bytes(int64_t world_size);

  at::Tensor control;
  Standing* standings;
  std::shared_ptr<Host> host;
  Backwards backwards;
  Calls calls;
  Roll* latest_roll = nullptr;       // told by `calls`, while it lives
  std::atomic<int> crowded_out = 0;  // gathers that wait for room; those after them wait too
  uint64_t copies = 0;               // so many SharedCopy so far
  std::shared_ptr<Mailbox> mailbox;
};

// Memory that gathered copies take turns in: that of one parameter, or of several.
struct Copies {
  // Bytes, shared, and mapped twice; nobody writes to the second.
  Copies(at::Tensor writable, at::Tensor readable);

  // Lets all that take turns do so in other memory, as of the next gather.
  void grow(at::Tensor writable, at::Tensor readable);

  Ring ring;
  at::Tensor writable;
  at::Tensor readable;
};

// A parameter's part in it.
class SharedCopy {
 public:
  // `progress` is zeros, shared: for each block of the gradient, a Progress for each rank.
  SharedCopy(std::shared_ptr<OneHost> one_host, const Parameter& parameter, at::Tensor progress,
             std::shared_ptr<Copies> copies);

  const std::shared_ptr<OneHost>& one_host() const { return one_host_; }
  const at::Tensor& progress() const { return progress_; }

  // Whether a backward cannot read the copy: it was never published, an optimizer has stepped,
  // another has its place, or it was published by another forward than that of the backward, for
  // which parameters may have been changed through `.data`, as `_version` does not tell.
  bool is_stale(const Parameter& parameter) const;
  bool is_gone() const { return turn_->is_over; }
  // Whether it has to be published again before a backward reads it.
  void invalidate(bool is_invalid = true) { is_invalid_ = is_invalid; }

  // Begins the next publication, of the shard at that version. Views of what was in its place get
  // memory of their own. False, and nothing is done: something is there that is pinned.
  bool arrive(const Parameter& parameter, uint64_t version, bool even_if_pinned);
  // Writes `shard`, this rank's rows, the cast in the same pass.
  void publish(const Parameter& parameter, const at::Tensor& shard);

  Ring::Pin pin() const { return Ring::Pin(turn_); }
  // The full tensor, of the parameter's sizes and strides, which nobody can write to.
  at::Tensor view(const Parameter& parameter);

  const uint64_t number;  // of those of its OneHost: the same on all ranks
  Publication publication;
  const std::vector<Block> blocks;
  std::vector<Deposit> deposits;  // of each

 private:
  using Views = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

  std::shared_ptr<OneHost> one_host_;
  at::Tensor progress_;
  std::shared_ptr<Copies> copies_;
  std::shared_ptr<Ring::Turn> turn_;  // of the latest publication
  std::shared_ptr<Views> views_;      // of that
  uint64_t published_version_ = 0;
  bool is_invalid_ = false;
};

// What a forward has published, for its backward to read.
class Publications {
 public:
  explicit Publications(const std::vector<ParameterPtr>& parameters);

  // To be called when that backward begins: what others have published since is invalidated.
  // Returns whether all ranks have to publish some again.
  bool invalidate_if_republished() const;

 private:
  std::vector<std::pair<std::weak_ptr<Parameter>, uint64_t>> epochs_;
};

// By that copy.
class PublishedBucket : public GatherBucket {
 public:
  using GatherBucket::GatherBucket;
  ~PublishedBucket() override;

  // Publishes: what a backward gathers was published by its forward, and may still be there.
  void start() override;
  void snapshot() override;
  std::vector<at::Tensor> finish(bool fresh) override;

 private:
  // What is published of a parameter.
  struct Source {
    at::Tensor shard;
    uint64_t version;
  };

  OneHost& one_host() const { return *parameters_.front()->shared->one_host(); }
  // As many as there is room for, and at least one if it has to be.
  void start_some(bool at_least_one);
  void publish_where_possible(bool waits);
  std::optional<Host::Missing> missing();

  std::vector<Source> sources_;  // of each
  bool in_backward_ = false;
  bool is_crowded_out_ = false;
  size_t started_ = 0;
  size_t finished_ = 0;
  std::vector<Ring::Pin> pins_;  // of those under way
};

// The descriptor of a new anonymous file of zeros, closed on exec.
int new_shared_file(int64_t nbytes);

// Lets nobody write to the memory of `mapped`, whole pages of it.
void make_read_only(const at::Tensor& mapped);

}  // namespace zero3
