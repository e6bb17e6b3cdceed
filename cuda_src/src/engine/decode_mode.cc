#include "engine/decode_mode.h"

#include <string>

#include "base/error.h"

namespace xllm {

const char *decode_mode_name(DecodeMode mode) {
  switch (mode) {
    case DecodeMode::kAuto:
      return "AUTO";
    case DecodeMode::kBatched:
      return "BATCHED";
    case DecodeMode::kPerSlot:
      return "PER_SLOT";
  }
  return "UNKNOWN";
}

std::optional<DecodeMode> effective_decode_mode(DecodeMode engine, DecodeMode requested) {
  if (engine == DecodeMode::kAuto) {
    return requested == DecodeMode::kPerSlot ? DecodeMode::kPerSlot : DecodeMode::kBatched;
  }
  if (requested == DecodeMode::kAuto || requested == engine) return engine;
  return std::nullopt;
}

DecodeMode resolve_decode_mode(DecodeMode engine, DecodeMode requested, const char *call) {
  const std::optional<DecodeMode> mode = effective_decode_mode(engine, requested);
  if (mode) return *mode;
  const std::string engine_name = decode_mode_name(engine);
  const std::string requested_name = decode_mode_name(requested);
  const std::string remedy = "request " + engine_name + " or AUTO, or create an engine in mode " +
                             requested_name + " or AUTO";
  throw Error(Status::kDecodeModeMismatch,
              std::string(call) + ": the engine decodes " + engine_name + ", the call asks for " +
                  requested_name + "; " + remedy,
              {{"engine_mode", engine_name},
               {"requested_mode", requested_name},
               {"call", call},
               {"remedy", remedy}});
}

void check_slot_mode(DecodeMode engine, DecodeMode slot, DecodeMode requested, const char *call) {
  if (requested == slot) return;
  const std::string slot_name = decode_mode_name(slot);
  const std::string requested_name = decode_mode_name(requested);
  const std::string remedy =
      std::string("decode this slot with ") +
      (slot == DecodeMode::kPerSlot ? "the per-slot calls" : "the batched calls") +
      ", or acquire one in mode " + requested_name;
  throw Error(Status::kDecodeModeMismatch,
              std::string(call) + ": the slot decodes " + slot_name + ", the call asks for " +
                  requested_name + "; " + remedy,
              {{"engine_mode", decode_mode_name(engine)},
               {"requested_mode", requested_name},
               {"call", call},
               {"remedy", remedy},
               {"slot_mode", slot_name}});
}

}  // namespace xllm
