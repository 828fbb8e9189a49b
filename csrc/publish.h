// Gathers of ranks that share memory: one copy of each parameter, which all ranks read, and of
// which each writes its rows.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "gather.h"
#include "mailbox.h"
#include "one_host.h"

namespace zero3 {

// The ranks of a process group that live on one host.
struct OneHost {
  // `control` is zeros, shared: a Bell, and a Standing for each rank.
  OneHost(const std::string& group_name, int64_t rank, const std::vector<int64_t>& pids,
          at::Tensor control);

  static int64_t control_bytes(int64_t world_size);

  at::Tensor control;
  std::shared_ptr<Host> host;
  Standing* standings;
  Backwards backwards;
  std::shared_ptr<Mailbox> mailbox;
};

// A parameter's part in it.
class SharedCopy {
 public:
  // `progress` is zeros, shared: a Progress for each rank. `writable` and `readable` are the same
  // full tensor, mapped twice.
  SharedCopy(std::shared_ptr<OneHost> one_host, int64_t rank, at::Tensor progress,
             at::Tensor writable, at::Tensor readable);

  const std::shared_ptr<OneHost>& one_host() const { return one_host_; }
  const at::Tensor& progress() const { return progress_; }

  // Whether the copy may be older than the shard: it was never published, or an optimizer has
  // stepped. (`_version` misses changes through `.data`, so that forwards publish always.)
  bool is_stale(const Parameter& parameter) const;

  // Begins the next publication. Views of the copy that are still alive get memory of their own.
  void arrive(const Parameter& parameter);
  // Writes this rank's rows, the cast in the same pass.
  void publish(const Parameter& parameter);

  // The full tensor, of the parameter's sizes and strides, which nobody can write to.
  at::Tensor view();

  Publication publication;
  Deposit deposit;

 private:
  std::shared_ptr<OneHost> one_host_;
  at::Tensor progress_;
  at::Tensor writable_;
  at::Tensor readable_;
  uint64_t published_version_ = 0;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> views_;
};

// By that copy.
class PublishedBucket : public GatherBucket {
 public:
  using GatherBucket::GatherBucket;

  // Publishes: what a backward gathers was published by its forward.
  void start() override;
  std::vector<at::Tensor> finish() override;

 private:
  void publish_where_possible();
  std::optional<Host::Missing> missing();
};

// Lets nobody write to the memory of `mapped`, whole pages of it.
void make_read_only(const at::Tensor& mapped);

}  // namespace zero3
