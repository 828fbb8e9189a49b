// A transport over files, outside of the package: each rank writes its rows and gradients into a
// folder, and reads those of the others. See docs/extending.md.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "transport/gather_bucket.h"
#include "transport/reduce_bucket.h"
#include "transport/transport.h"

namespace {

using namespace zero3;

// All ranks gather in one order, and reduce in one order: numbers tell files apart.
struct Files {
  std::string folder;
  int64_t rank, world_size, gathers = 0, reductions = 0;

  void write(const std::string& name, const at::Tensor& tensor) const {
    if (tensor.numel() == 0) return;  // nobody reads it
    const std::string path = folder + "/" + name + " of " + std::to_string(rank);
    at::from_file(path + ".part", /*shared=*/true, tensor.numel(), tensor.options())
        .copy_(tensor.reshape({-1}));
    std::filesystem::rename(path + ".part", path);
  }

  at::Tensor read(const std::string& name, int64_t of_rank, at::IntArrayRef sizes,
                  at::ScalarType dtype) const {
    if (c10::multiply_integers(sizes) == 0) return at::empty(sizes, dtype);
    const std::string path = folder + "/" + name + " of " + std::to_string(of_rank);
    for (int tries = 0; !std::filesystem::exists(path); ++tries) {
      TORCH_CHECK(tries < 60'000, "waited too long for '", path, "'");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return at::from_file(path, /*shared=*/true, c10::multiply_integers(sizes), dtype).view(sizes);
  }
};

struct FileGather : GatherBucket {
  FileGather(Files& files, std::vector<SourcePtr> sources)
      : GatherBucket(std::move(sources)), files(files), first(files.gathers) {}

  void start() override {
    for (auto& each : sources_)
      files.write("gather " + std::to_string(files.gathers++), each->shard.to(each->dtype));
  }

  std::vector<at::Tensor> finish(bool fresh) override {
    std::vector<at::Tensor> fulls;
    for (auto& each : sources_) {
      const auto name = "gather " + std::to_string(first + fulls.size());
      auto full = at::empty_strided(each->sizes, each->strides, each->dtype);
      for (int64_t r = 0; r < files.world_size; ++r) {
        auto rows = full.narrow(0, each->layout.first_row_of(r), each->layout.rows_of(r));
        rows.copy_(files.read(name, r, rows.sizes(), each->dtype));
      }
      fulls.push_back(full);
    }
    return fulls;
  }

  Files& files;
  int64_t first;
};

struct FileReduce : ReduceBucket {
  FileReduce(Files& files, const Parameter& like, const BucketKey& key)
      : ReduceBucket(like, key), files(files) {}

  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            at::ScalarType shard_dtype, bool owned) override {
    sent.push_back({"reduce " + std::to_string(files.reductions++), shard_dtype});
    files.write(sent.back().first, grad.to(through).to(wire_dtype()));
  }

  std::vector<at::Tensor> finish() override {
    std::vector<at::Tensor> shards;
    for (auto& [name, shard_dtype] : sent) {
      const auto& of = *parameters()[shards.size()];
      auto sum = at::zeros(of.sizes(), c10::promoteTypes(wire_dtype(), at::kFloat));
      for (int64_t r = 0; r < files.world_size; ++r)
        sum += files.read(name, r, of.sizes(), wire_dtype());
      const auto& layout = of.source->layout;
      const auto rows = sum.narrow(0, layout.first_row_of(rank_), layout.rows_of(rank_));
      shards.push_back(rows.to(wire_dtype()).div(divisor_now()).to(shard_dtype));
    }
    return shards;
  }

  Files& files;
  std::vector<std::pair<std::string, at::ScalarType>> sent;
};

struct FileBackward : Backward {
  explicit FileBackward(Files& files) : files(files) {}

  std::unique_ptr<ReduceBucket> reduce_bucket(const Parameter& like, const BucketKey& key,
                                              bool in_pieces) override {
    return std::make_unique<FileReduce>(files, like, key);
  }
  std::unique_ptr<PresenceGather> gather_presences(const std::vector<ParameterPtr>&,
                                                   const Presences&, Occasion) override {
    TORCH_CHECK(false, "files tell no presences");
  }

  Files& files;
};

struct FileTransport : Transport {
  FileTransport(std::string folder, int64_t rank, int64_t world_size)
      : Transport({.sums_in_fp32 = true, .reduces_in_any_order = false, .tells_presence = false}),
        files{std::move(folder), rank, world_size} {}

  std::string name() const override { return "files"; }
  bool joins(const Transport& other) const override { return this == &other; }
  std::unique_ptr<GatherBucket> gather_bucket(std::vector<SourcePtr> sources) override {
    return std::make_unique<FileGather>(files, std::move(sources));
  }
  std::unique_ptr<Backward> begin_backward() override {
    return std::make_unique<FileBackward>(files);
  }

  Files files;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<FileTransport, Transport, std::shared_ptr<FileTransport>>(m, "FileTransport")
      .def(pybind11::init<std::string, int64_t, int64_t>());
}
