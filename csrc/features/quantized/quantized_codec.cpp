#include "features/quantized/quantized_codec.h"

#include "features/quantized/quantize.h"

namespace zero3 {
namespace {

class QuantizedCodec : public Codec {
 public:
  explicit QuantizedCodec(const QuantizedFormat& format) : Codec(format.text()), format_(format) {}

  int64_t row_bytes(int64_t row_numel) const override { return format_.row_bytes(row_numel); }

  at::Tensor encode(const at::Tensor& rows) const override { return quantize(rows, format_); }

  void decode(const at::Tensor& rows, const at::Tensor& encoded) const override {
    dequantize(rows, encoded, format_);
  }

  void sum(const at::Tensor& rows, const std::vector<at::Tensor>& addends,
           double divisor) const override {
    sum_quantized(rows, addends, format_, divisor);
  }

 private:
  const QuantizedFormat format_;
};

}  // namespace

std::unique_ptr<const Codec> make_quantized_codec(const std::string& text) {
  return std::make_unique<QuantizedCodec>(QuantizedFormat::parse(text));
}

}  // namespace zero3
