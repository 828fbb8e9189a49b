#include "parameter/codec.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "support/error.h"

namespace zero3 {
namespace {

MakeCodec make_codec = nullptr;

}  // namespace

const Codec* codec_of(const std::string& text) {
  if (text.empty()) return nullptr;
  static std::mutex mutex;
  static auto& codecs = *new std::map<std::string, std::unique_ptr<const Codec>>;
  std::lock_guard lock(mutex);
  auto found = codecs.find(text);
  if (found == codecs.end()) {
    ZERO3_CHECK(make_codec, "there is no codec '", text, "'");
    found = codecs.emplace(text, make_codec(text)).first;
  }
  return found->second.get();
}

std::vector<const Codec*> codecs_of(const std::string& texts, size_t count) {
  std::vector<const Codec*> codecs;
  if (!texts.empty())
    for (size_t begin = 0; begin <= texts.size();) {
      const auto end = std::min(texts.find(',', begin), texts.size());
      codecs.push_back(codec_of(texts.substr(begin, end - begin)));
      begin = end + 1;
    }
  ZERO3_CHECK(codecs.empty() || codecs.size() == count, "there are ", codecs.size(),
              " formats for ", count, " parameters: '", texts, "'");
  codecs.resize(count);
  return codecs;
}

void set_make_codec(MakeCodec make) { make_codec = make; }

}  // namespace zero3
