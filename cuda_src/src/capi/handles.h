// What stands behind the opaque handles of xllm.h.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/model_file.h"
#include "xllm.h"

namespace xllm {

struct MetadataText {
  std::string key, type, json;
};

struct EndTokenText {
  int32_t id;
  std::string text, source;
};

}  // namespace xllm

struct xllm_model {
  std::shared_ptr<const xllm::ModelFile> file;
  std::string architecture, name;
  std::string chat_template;
  std::vector<xllm::Fact> facts;
  std::vector<std::string> tensor_names;
  std::vector<xllm::EndTokenText> end_tokens;
  // Made when first asked for: a vocabulary's arrays are not worth reading for every caller.
  mutable std::once_flag metadata_once;
  mutable std::vector<xllm::MetadataText> metadata;
};

struct xllm_engine {
  std::unique_ptr<xllm::Engine> engine;
};

struct xllm_events {
  std::vector<xllm::Event> events;
  std::vector<xllm_candidate> candidates;
  std::vector<xllm_event> views;
};
