#include "transport/shared/one_host.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "support/error.h"
#include "transport/c10d/process_group.h"
#include "transport/same_forwards.h"

namespace zero3 {
namespace {

bool kernel_never_overcommits() {
  int mode = 0;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> mode;
  return mode == 2;
}

}  // namespace

int64_t OneHost::control_bytes(int64_t world_size) {
  return sizeof(WakeWord) + world_size * sizeof(RankState);
}

OneHost::OneHost(const std::string& group_name, int64_t rank, std::vector<std::string> rank_names,
                 const std::vector<int64_t>& pids, at::Tensor control)
    : group_name(group_name),
      control(std::move(control)),
      rank_states(reinterpret_cast<RankState*>(data_of(this->control) + sizeof(WakeWord))),
      waiter(new RankWaiter(reinterpret_cast<WakeWord*>(data_of(this->control)), rank_states, rank,
                            std::vector<pid_t>(pids.begin(), pids.end()), timeout_of(group_name),
                            same_forwards()),
             // A wait of another group polls this group's mailbox, and may keep it, and so the
             // waiter, alive after this object.
             [memory = this->control](RankWaiter* self) { delete self; }),
      backwards(rank_states, rank),
      announcements(rank_states, rank, static_cast<int64_t>(pids.size())) {
  waiter->name_ranks(RankNames(std::move(rank_names)));
}

CopyMemory::CopyMemory(at::Tensor writable, at::Tensor readable)
    : ring(writable.nbytes()), writable(std::move(writable)), readable(std::move(readable)) {}

void CopyMemory::grow(at::Tensor writable, at::Tensor readable) {
  ring.grow(writable.nbytes());
  this->writable = std::move(writable);
  this->readable = std::move(readable);
}

int new_shared_file(int64_t nbytes) {
  // Not every Python, nor every libc, has memfd_create().
  const int file = static_cast<int>(syscall(SYS_memfd_create, "zero3", MFD_CLOEXEC));
  ZERO3_CHECK(file >= 0, "memfd_create failed: ", std::strerror(errno));
  int error = fchmod(file, 0600) == 0 && ftruncate(file, nbytes) == 0 ? 0 : errno;
  // If such a kernel has no page when one is first touched, the process ends with SIGBUS.
  if (error == 0 && kernel_never_overcommits()) {
    do error = posix_fallocate(file, 0, nbytes);
    while (error == EINTR);
  }
  if (error == 0) return file;
  close(file);
  ZERO3_CHECK(false, "a file of ", nbytes, " bytes failed: ", std::strerror(error));
}

void make_read_only(const at::Tensor& mapped) {
  ZERO3_CHECK(mprotect(mapped.data_ptr(), mapped.nbytes(), PROT_READ) == 0,
              "mprotect failed: ", std::strerror(errno));
}

}  // namespace zero3
