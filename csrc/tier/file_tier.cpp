#include "tier/file_tier.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "support/error.h"

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
  const int named = ::mkstemp(name.data());
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
    : folder(std::move(folder)), number(number), fd_(fd) {}

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

std::shared_ptr<FileTier> FileTier::numbered(int64_t number) {
  auto& live = tiers();
  std::lock_guard lock(live.mutex);
  const auto found = live.by_number.find(number);
  auto tier = found == live.by_number.end() ? nullptr : found->second.lock();
  ZERO3_CHECK(tier, "a graph offloads to tier ", number,
              ", which is gone: its FileOffloadPolicy was deleted");
  return tier;
}

FileTier::~FileTier() {
  for (auto& [nbytes, slabs] : free_)
    for (auto& slab : slabs) ::munmap(slab.memory, nbytes);
  ::close(fd_);
}

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
  nbytes = (nbytes + page_bytes() - 1) / page_bytes() * page_bytes();
  std::lock_guard lock(mutex_);
  Slab slab{shared_from_this(), nullptr, 0, nbytes};
  if (auto found = free_.find(nbytes); found != free_.end() && !found->second.empty()) {
    slab.memory = found->second.back().memory;
    slab.offset = found->second.back().offset;
    found->second.pop_back();
  } else {
    // Takes the space now: a full disk behind a mapping would be a signal that ends the process.
    if (const int error = ::posix_fallocate(fd_, file_bytes_, nbytes))
      fail("taking", nbytes, error);
    slab.offset = file_bytes_;
    slab.memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, slab.offset);
    if (slab.memory == MAP_FAILED) fail("mapping", nbytes, errno);
    file_bytes_ += nbytes;
  }
  in_use_ += nbytes;
  return slab;
}

void FileTier::give_back(const Slab& slab) {
  ::madvise(slab.memory, slab.nbytes, MADV_DONTNEED);
  std::lock_guard lock(mutex_);
  in_use_ -= slab.nbytes;
  free_[slab.nbytes].push_back({nullptr, slab.memory, slab.offset, slab.nbytes});
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
  return at::empty({0}, options).set_(storage, 0, sizes, strides);
}

at::Tensor FileTier::copy(const at::Tensor& tensor) {
  auto result = empty(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  result.copy_(tensor);
  count_written(static_cast<int64_t>(tensor.nbytes()));
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
  for (int64_t done = 0; done < nbytes;) {
    const auto n =
        ::pwrite(fd_, static_cast<const char*>(from) + done, nbytes - done, to.offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("writing", nbytes, n < 0 ? errno : ENOSPC);
    done += n;
  }
#ifdef SYNC_FILE_RANGE_WRITE
  // Starts to write it to the disk, so that the kernel can take the pages when it needs memory.
  ::sync_file_range(fd_, to.offset, nbytes, SYNC_FILE_RANGE_WRITE);
#endif
  count_written(nbytes);
}

void FileTier::read(const Slab& from, void* to, int64_t nbytes) {
  for (int64_t done = 0; done < nbytes;) {
    const auto n = ::pread(fd_, static_cast<char*>(to) + done, nbytes - done, from.offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("reading", nbytes, n < 0 ? errno : EIO);
    done += n;
  }
  ::posix_fadvise(fd_, from.offset, nbytes, POSIX_FADV_DONTNEED);
  count_read(nbytes);
}

const Slab* slab_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.is_cpu()) return nullptr;
  // Without the check for data, which a placeholder has not.
  auto& memory = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return memory.cast_context<Slab>(&FileTier::free);
}

void finish_reading(const at::Tensor& tensor) {
  const Slab* slab = slab_of(tensor);
  if (!slab) return;
  slab->tier->count_read(static_cast<int64_t>(tensor.nbytes()));
  ::madvise(slab->memory, slab->nbytes, MADV_DONTNEED);
}

void prefetch_pages(const at::Tensor& tensor) {
  if (const Slab* slab = slab_of(tensor)) ::madvise(slab->memory, slab->nbytes, MADV_WILLNEED);
}

}  // namespace zero3
