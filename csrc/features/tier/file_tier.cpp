#include "features/tier/file_tier.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "support/error.h"
#include "support/tensor_ops.h"

namespace zero3 {
namespace {

int64_t page_bytes() {
  static const int64_t nbytes = sysconf(_SC_PAGESIZE);
  return nbytes;
}

// Returns a file without a name in `folder`, or -1 with errno set.
int open_unnamed(const std::string& folder) {
#ifdef O_TMPFILE
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
#endif
  std::string name = folder + "/zero3-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

// The live tiers, by number.
struct Tiers {
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<FileTier>> by_number;
};

Tiers& tiers() {
  static auto& tiers = *new Tiers;  // never destroyed: tensors may outlive statics
  return tiers;
}

}  // namespace

FileTier::FileTier(std::string folder, int fd, int64_t number)
    : folder(std::move(folder)), number(number), fd_(fd), process_(::getpid()) {}

std::shared_ptr<FileTier> FileTier::open(const std::string& folder) {
  const int fd = open_unnamed(folder);
  ZERO3_CHECK(fd >= 0, "no file for offloading can be made in '", folder,
              "': ", std::strerror(errno), ". Name a folder on a local disk that you may write to");
  auto& live = tiers();
  std::lock_guard lock(live.mutex);
  int64_t number = 0;  // the first that is free
  while (live.by_number.contains(number) && !live.by_number[number].expired()) ++number;
  std::shared_ptr<FileTier> tier(new FileTier(folder, fd, number));
  live.by_number[number] = tier;
  return tier;
}

bool FileTier::is_in_memory() const {
  struct statfs disk{};
  constexpr auto kTmpfs = 0x01021994, kRamfs = static_cast<int>(0x858458f6);
  return ::fstatfs(fd_, &disk) == 0 &&
         (static_cast<int>(disk.f_type) == kTmpfs || static_cast<int>(disk.f_type) == kRamfs);
}

std::shared_ptr<FileTier> FileTier::numbered(int64_t number) {
  auto& live = tiers();
  std::lock_guard lock(live.mutex);
  const auto found = live.by_number.find(number);
  auto tier = found == live.by_number.end() ? nullptr : found->second.lock();
  ZERO3_CHECK(tier, "a graph offloads to tier ", number,
              ", which is gone: its FileOffloadPolicy was deleted");
  return tier;
}

FileTier::~FileTier() { ::close(fd_); }

void FileTier::fail(const std::string& what, int64_t nbytes, int error) const {
  struct statvfs disk{};
  const bool is_known = ::statvfs(folder.c_str(), &disk) == 0;
  const int64_t mib = 1 << 20;
  throw_error(c10::str(
      "offloading to '", folder, "': ", what, " ", nbytes, " bytes failed: ", std::strerror(error),
      is_known
          ? c10::str(" (", static_cast<int64_t>(disk.f_bavail * disk.f_frsize) / mib,
                     " MiB are free there, and ", file_bytes_ / mib, " MiB are this process's)")
          : std::string(),
      ". Free space, name another folder, or give a larger memory_budget_mb"));
}

Slab FileTier::take(int64_t nbytes) {
  check_process();
  nbytes = (nbytes + page_bytes() - 1) / page_bytes() * page_bytes();
  std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto extent = free_.begin(); extent != free_.end(); ++extent)
    if (extent->second >= nbytes && (best == free_.end() || extent->second < best->second))
      best = extent;
  if (best == free_.end()) {
    // Takes the space now: a full disk behind a mapping would be a signal that ends the process.
    int error;
    do error = ::posix_fallocate(fd_, file_bytes_, nbytes);
    while (error == EINTR);
    if (error) fail("taking", nbytes, error);
    best = free_.emplace(file_bytes_, nbytes).first;
    file_bytes_ += nbytes;
  }
  const int64_t offset = best->first;
  void* memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, offset);
  if (memory == MAP_FAILED) fail("mapping", nbytes, errno);
  ::madvise(memory, nbytes, MADV_DONTFORK);  // a child's writes would reach its parent
  const int64_t rest = best->second - nbytes;
  free_.erase(best);
  if (rest > 0) free_[offset + nbytes] = rest;
  in_use_ += nbytes;
  return {shared_from_this(), memory, offset, nbytes};
}

void FileTier::give_back(const Slab& slab) {
  ::munmap(slab.memory, slab.nbytes);
  std::lock_guard lock(mutex_);
  in_use_ -= slab.nbytes;
  auto extent = free_.emplace(slab.offset, slab.nbytes).first;
  if (auto next = std::next(extent);
      next != free_.end() && extent->first + extent->second == next->first) {
    extent->second += next->second;
    free_.erase(next);
  }
  if (extent == free_.begin()) return;
  if (auto last = std::prev(extent); last->first + last->second == extent->first) {
    last->second += extent->second;
    free_.erase(extent);
  }
}

void FileTier::check_process() const {
  ZERO3_CHECK(::getpid() == process_, "offloading to '", folder, "': process ", ::getpid(),
              " was forked from process ", process_,
              ", whose file it is: train in processes that were spawned");
}

void FileTier::free(void* context) {
  const std::unique_ptr<Slab> slab(static_cast<Slab*>(context));
  slab->tier->give_back(*slab);
}

at::Tensor FileTier::empty(at::IntArrayRef sizes, at::IntArrayRef strides,
                           const at::TensorOptions& options) {
  const auto nbytes = static_cast<int64_t>(
      at::detail::computeStorageNbytes(sizes, strides, options.dtype().itemsize()));
  auto slab = std::make_unique<Slab>(take(std::max<int64_t>(nbytes, 1)));
  void* memory = slab->memory;
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(nbytes),
                       c10::DataPtr(memory, slab.release(), &FileTier::free, at::kCPU),
                       /*allocator=*/nullptr, /*resizable=*/false);
  return tensor_ops::empty({0}, options).set_(storage, 0, sizes, strides);
}

at::Tensor FileTier::copy(const at::Tensor& tensor) {
  auto result = empty(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  result.copy_(tensor);
  written_ += static_cast<int64_t>(tensor.nbytes());
  const Slab& slab = *slab_of(result);
  ::madvise(slab.memory, slab.nbytes, MADV_DONTNEED);
  return result;
}

TierStats FileTier::stats() const {
  std::lock_guard lock(mutex_);
  return {in_use_, file_bytes_, written_, read_, transfer_time_, wait_time_};
}

void FileTier::count_time(double transfer, double wait) {
  std::lock_guard lock(mutex_);
  transfer_time_ += transfer;
  wait_time_ += wait;
}

void FileTier::write(const void* from, const Slab& to, int64_t nbytes) {
  check_process();
  for (int64_t done = 0; done < nbytes;) {
    const auto n =
        ::pwrite(fd_, static_cast<const char*>(from) + done, nbytes - done, to.offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("writing", nbytes, n < 0 ? errno : ENOSPC);
    done += n;
  }
  written_ += nbytes;
}

void FileTier::read(const Slab& from, void* to, int64_t nbytes) {
  for (int64_t done = 0; done < nbytes;) {
    const auto n = ::pread(fd_, static_cast<char*>(to) + done, nbytes - done, from.offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("reading", nbytes, n < 0 ? errno : EIO);
    done += n;
  }
  count_read(nbytes);
}

bool is_movable(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.numel() > 0 &&
         tensor.is_non_overlapping_and_dense();
}

const Slab* slab_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.is_cpu()) return nullptr;
  // Without the check for data, which a placeholder has not.
  auto& memory = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return memory.cast_context<Slab>(&FileTier::free);
}

void finish_reading_slab(const at::Tensor& tensor) {
  const Slab* slab = slab_of(tensor);
  if (!slab) return;
  slab->tier->count_read(static_cast<int64_t>(tensor.nbytes()));
  ::madvise(slab->memory, slab->nbytes, MADV_DONTNEED);
}

}  // namespace zero3
