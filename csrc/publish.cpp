#include "publish.h"

#include <ATen/ops/from_blob.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "autograd.h"
#include "error.h"
#include "exchange.h"
#include "grad_dtype.h"
#include "memory.h"
#include "stream.h"
#include "sum.h"

namespace zero3 {
namespace {

char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

uint64_t nbytes_of(const Parameter& parameter) {
  return parameter.rows() * parameter.row_numel() * c10::elementSize(parameter.compute_dtype);
}

}  // namespace

int64_t OneHost::control_bytes(int64_t world_size) {
  return sizeof(Bell) + world_size * sizeof(Standing);
}

OneHost::OneHost(const std::string& group_name, int64_t rank, const std::vector<int64_t>& pids,
                 at::Tensor control)
    : control(std::move(control)),
      standings(reinterpret_cast<Standing*>(data_of(this->control) + sizeof(Bell))),
      host(std::make_shared<Host>(reinterpret_cast<Bell*>(data_of(this->control)), standings, rank,
                                  std::vector<pid_t>(pids.begin(), pids.end()),
                                  timeout_of(group_name))),
      backwards(standings, rank),
      calls(standings, rank, static_cast<int64_t>(pids.size())) {}

Copies::Copies(at::Tensor writable, at::Tensor readable)
    : ring(writable.nbytes()), writable(std::move(writable)), readable(std::move(readable)) {}

void Copies::grow(at::Tensor writable, at::Tensor readable) {
  ring.grow(writable.nbytes());
  this->writable = std::move(writable);
  this->readable = std::move(readable);
}

SharedCopy::SharedCopy(std::shared_ptr<OneHost> one_host, const Parameter& parameter,
                       at::Tensor progress, std::shared_ptr<Copies> copies)
    : number(one_host->copies++),
      publication(reinterpret_cast<Progress*>(data_of(progress)), parameter.rank,
                  parameter.world_size),
      blocks(blocks_of(parameter.rows(),
                       static_cast<int64_t>(nbytes_of(parameter)) / parameter.rows(),
                       parameter.world_size)),
      one_host_(std::move(one_host)),
      progress_(std::move(progress)),
      copies_(std::move(copies)) {
  copies_->ring.admit(nbytes_of(parameter));
  auto* ranks = reinterpret_cast<Progress*>(data_of(progress_));
  for (auto& block : blocks) {
    deposits.emplace_back(ranks, one_host_->standings, parameter.rank, parameter.world_size,
                          block.owner);
    ranks += parameter.world_size;
  }
}

bool SharedCopy::is_stale(const Parameter& parameter) const {
  return !turn_ || turn_->is_over || is_invalid_ || parameter.shard_version() != published_version_;
}

bool SharedCopy::arrive(const Parameter& parameter, uint64_t version, bool even_if_pinned) {
  auto turn = copies_->ring.next(nbytes_of(parameter), even_if_pinned);
  if (!turn) return false;
  turn_ = std::move(turn);
  is_invalid_ = false;
  views_ = std::make_shared<Views>();
  turn_->leave = [views = views_] {
    for (auto& weak : *views) {
      auto storage = weak.lock();
      if (!storage) continue;
      const auto nbytes = static_cast<int64_t>(storage->nbytes());
      auto own = pooled_empty({nbytes}, at::TensorOptions(at::kByte));
      std::memcpy(own.mutable_data_ptr(), storage->data(), nbytes);
      storage->set_data_ptr(own.storage().set_data_ptr({}));
    }
  };
  published_version_ = version;
  publication.arrive(turn_->history);
  return true;
}

void SharedCopy::publish(const Parameter& parameter, const at::Tensor& shard) {
  if (const int64_t rows = parameter.shard_rows(); rows > 0) {
    auto mine = at::from_blob(data_of(copies_->writable) + turn_->begin, parameter.sizes,
                              parameter.strides, at::TensorOptions(parameter.compute_dtype))
                    .narrow(0, parameter.rank * parameter.chunk_rows(), rows);
    const auto nbytes = static_cast<int64_t>(mine.nbytes());
    const bool may_stream =
        nbytes >= kWorthStreaming && mine.is_contiguous() && shard.is_contiguous();
    if (may_stream && mine.dtype() == shard.dtype()) {
      stream(mine.mutable_data_ptr(), shard.const_data_ptr(), nbytes);
      finish_streaming();
    } else if (may_stream && mine.scalar_type() == at::kBFloat16 &&
               is_gradient_dtype(shard.scalar_type())) {
      sum_and_divide(mine, {shard}, shard.scalar_type(), 1);  // a cast, quicker than torch's
    } else {
      mine.copy_(shard);
    }
  }
  publication.publish();
}

at::Tensor SharedCopy::view(const Parameter& parameter) {
  auto view = at::for_blob(data_of(copies_->readable) + turn_->begin, parameter.sizes)
                  .strides(parameter.strides)
                  .deleter([mapped = copies_->readable](void*) {})
                  .options(at::TensorOptions(parameter.compute_dtype))
                  .make_tensor();
  std::erase_if(*views_, [](auto& weak) { return weak.expired(); });
  views_->emplace_back(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(view.storage().unsafeGetStorageImpl()));
  return view;
}

Publications::Publications(const std::vector<ParameterPtr>& parameters) {
  for (auto& parameter : parameters)
    if (parameter->shared) epochs_.emplace_back(parameter, parameter->shared->publication.epoch());
}

bool Publications::invalidate_if_republished() const {
  bool is_stale = false;
  for (auto& [weak, epoch] : epochs_) {
    const auto parameter = weak.lock();
    if (!parameter) continue;
    auto& shared = *parameter->shared;
    shared.invalidate(shared.publication.epoch() != epoch);
    is_stale |= shared.is_stale(*parameter);
  }
  return is_stale;
}

PublishedBucket::~PublishedBucket() {
  if (is_crowded_out_) --one_host().crowded_out;
}

void PublishedBucket::start() {
  in_backward_ = in_backward();
  for (auto& parameter : parameters_)
    sources_.push_back({parameter->shard, parameter->shard_version()});
  one_host().host->begin_anew();
  if (one_host().crowded_out == 0) start_some(/*at_least_one=*/false);
  is_crowded_out_ = started_ < parameters_.size();
  if (is_crowded_out_) ++one_host().crowded_out;
  record([this] { return collective(); });
}

void PublishedBucket::snapshot() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = *parameters_[i];
    auto& shard = sources_[i].shard;
    if (i >= started_ || !parameter.shared->publication.is_published())
      shard = shard.to(parameter.compute_dtype, /*non_blocking=*/false, /*copy=*/true);
  }
}

std::vector<at::Tensor> PublishedBucket::finish(bool fresh) {
  for (size_t i = 0; i < pins_.size(); ++i)
    ZERO3_CHECK(!pins_[i].has_failed() && !parameters_[i]->shared->is_gone(), "'",
                parameters_[i]->fqn,
                "' was gathered, and waited for after others that were gathered later");
  std::vector<at::Tensor> fulls;
  while (finished_ < parameters_.size()) {
    // What is in the way now was started by somebody who has raised since, and will not read it.
    start_some(/*at_least_one=*/started_ == finished_);
    one_host().host->wait([this] { return missing(); });
    for (; finished_ < started_; ++finished_) {
      auto& parameter = *parameters_[finished_];
      auto full = parameter.shared->view(parameter);
      if (fresh) full = pooled_copy(full);
      fulls.push_back(full);
    }
    pins_.clear();
  }
  return fulls;
}

void PublishedBucket::start_some(bool at_least_one) {
  bool arrived = false;
  for (; started_ < parameters_.size(); ++started_, at_least_one = false) {
    auto& parameter = *parameters_[started_];
    if (!in_backward_ || parameter.shared->is_stale(parameter)) {
      if (!parameter.shared->arrive(parameter, sources_[started_].version, at_least_one)) break;
      if (!in_backward_) one_host().backwards.count_publication();
      arrived = true;
    }
    pins_.push_back(parameter.shared->pin());
  }
  if (arrived) one_host().host->ring();
  publish_where_possible(/*waits=*/false);
}

void PublishedBucket::publish_where_possible(bool waits) {
  bool published = false;
  for (size_t i = finished_; i < started_; ++i) {
    auto& parameter = *parameters_[i];
    const auto& publication = parameter.shared->publication;
    if (publication.is_published() || !publication.readers().empty()) continue;
    if (!publication.is_at_one_place()) {
      ZERO3_CHECK(!waits, "ranks have gathered different things before '", parameter.fqn,
                  "': something has raised on some of them, or they do not run the same. All ranks "
                  "must run the same forwards and backwards; start them again");
      continue;
    }
    parameter.shared->publish(parameter, sources_[i].shard);
    published = true;
  }
  if (published) one_host().host->ring();
}

std::optional<Host::Missing> PublishedBucket::missing() {
  publish_where_possible(/*waits=*/true);
  one_host().mailbox->poll_everywhere();  // others may wait for it
  for (size_t i = finished_; i < started_; ++i) {
    const auto& publication = parameters_[i]->shared->publication;
    const auto& fqn = parameters_[i]->fqn;
    if (!publication.is_published())
      return {{publication.readers(), "it has not begun to gather '" + fqn + "'"}};
    if (auto writers = publication.writers(); !writers.empty())
      return {{std::move(writers), "it has not published its rows of '" + fqn + "'"}};
  }
  return std::nullopt;
}

int new_shared_file(int64_t nbytes) {
  // Not every Python, nor every libc, has a function for it.
  const int file = static_cast<int>(syscall(SYS_memfd_create, "zero3", MFD_CLOEXEC));
  ZERO3_CHECK(file >= 0, "memfd_create failed: ", std::strerror(errno));
  if (fchmod(file, 0600) == 0 && ftruncate(file, nbytes) == 0) return file;
  const int error = errno;
  close(file);
  ZERO3_CHECK(false, "a file of ", nbytes, " bytes failed: ", std::strerror(error));
}

void make_read_only(const at::Tensor& mapped) {
  ZERO3_CHECK(mprotect(mapped.data_ptr(), mapped.nbytes(), PROT_READ) == 0,
              "mprotect failed: ", std::strerror(errno));
}

}  // namespace zero3
