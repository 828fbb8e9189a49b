// Memory in a file: tensors that may leave main memory, and copies between the two.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace zero3 {

class FileTier;

// A part of a tier's file, mapped to memory. One tensor has it at a time.
struct Slab {
  std::shared_ptr<FileTier> tier;
  void* memory;
  int64_t offset;  // in the file
  int64_t nbytes;  // a multiple of the page size
};

// Traffic of a tier since it was made. Counts the bytes of tensors.
struct TierStats {
  int64_t in_use;        // bytes of tensors in the file
  int64_t file_bytes;    // size of the file
  int64_t written;       // bytes
  int64_t read;          // bytes
  double transfer_time;  // seconds of asynchronous copies
  double wait_time;      // seconds that computation has waited for them
};

// A file of this process without a name, in a folder of the user's. It takes the space on the disk
// before a tensor is there, and goes with the process. A tensor in it is an ordinary CPU tensor,
// whose pages the kernel writes back and reads again.
class FileTier : public std::enable_shared_from_this<FileTier> {
 public:
  // Throws if no file can be made in `folder`.
  static std::shared_ptr<FileTier> open(const std::string& folder);
  // Returns the live tier of that number, by which graphs know it. Throws if there is none.
  static std::shared_ptr<FileTier> numbered(int64_t number);
  ~FileTier();
  FileTier(const FileTier&) = delete;
  FileTier& operator=(const FileTier&) = delete;

  // Returns an uninitialized tensor in the file. Throws if the disk is full.
  at::Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides,
                   const at::TensorOptions& options);
  // Returns a copy in the file, with the strides of `tensor`.
  at::Tensor copy(const at::Tensor& tensor);
  TierStats stats() const;
  bool is_in_memory() const;  // whether the file takes memory, and no space on a disk

  // Copy between memory and the slab's part of the file. They throw what the disk reports. The
  // kernel decides when a page goes to the disk: a sync would write data that no one reads again,
  // and delay the next write to the page.
  void write(const void* from, const Slab& to, int64_t nbytes);
  void read(const Slab& from, void* to, int64_t nbytes);
  void count_read(int64_t nbytes) { read_ += nbytes; }
  void check_process() const;  // throws in a child that was forked
  void count_time(double transfer, double wait);

  const std::string folder;
  const int64_t number;

 private:
  FileTier(std::string folder, int fd, int64_t number);
  Slab take(int64_t nbytes);
  void give_back(const Slab& slab);
  static void free(void* slab);  // of a tensor that has died
  [[noreturn]] void fail(const std::string& what, int64_t nbytes, int error) const;
  friend const Slab* slab_of(const at::Tensor& tensor);

  const int fd_;
  const int process_;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset and size of each free extent of the file
  std::atomic<int64_t> file_bytes_ = 0;
  int64_t in_use_ = 0;
  std::atomic<int64_t> written_ = 0;
  std::atomic<int64_t> read_ = 0;
  double transfer_time_ = 0;
  double wait_time_ = 0;
};

// Whether a tensor may be moved to a file: it is on the CPU, and its elements fill its memory.
bool is_movable(const at::Tensor& tensor);

// Returns the slab of a tensor in a file, or null for another tensor.
const Slab* slab_of(const at::Tensor& tensor);

// Call when `tensor` was read. If it is in a file, counts its bytes, and lets its pages leave main
// memory.
void finish_reading_slab(const at::Tensor& tensor);

}  // namespace zero3
