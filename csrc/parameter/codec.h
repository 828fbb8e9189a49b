// As which bytes rows travel, if not cast to a dtype. Features bring codecs.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace zero3 {

// Codecs live as long as the process. Two of one text are the same object.
class Codec {
 public:
  explicit Codec(std::string text) : text(std::move(text)) {}
  virtual ~Codec() = default;
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  const std::string text;  // such as "float8_e4m3fn/128"

  // Bytes of a row of `row_numel` elements.
  virtual int64_t row_bytes(int64_t row_numel) const = 0;
  // Encodes `rows` [n, ...], in a floating dtype, as uint8 [n, row_bytes].
  virtual at::Tensor encode(const at::Tensor& rows) const = 0;
  // Writes to `rows` [n, ...] what `encoded` [n, row_bytes] stands for.
  virtual void decode(const at::Tensor& rows, const at::Tensor& encoded) const = 0;
  // Sets `rows` to the sum of what `addends` stand for, in fp32 and in their order, over `divisor`.
  virtual void sum(const at::Tensor& rows, const std::vector<at::Tensor>& addends,
                   double divisor) const = 0;
};

// Returns the codec of a text, or null for an empty one. Raises if no feature knows the text.
const Codec* codec_of(const std::string& text);

// Returns the codecs of several parameters, from a text such as "float8_e4m3fn/128,,int8/64": null
// for one that is cast. An empty text is for any number of those.
std::vector<const Codec*> codecs_of(const std::string& texts, size_t count);

// Sets what makes a codec of a text, and raises if the text is of none.
using MakeCodec = std::unique_ptr<const Codec> (*)(const std::string& text);
void set_make_codec(MakeCodec make);

}  // namespace zero3
