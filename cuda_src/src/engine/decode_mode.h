// The two ways to decode, and the table that says which request an engine takes.
//
//   engine \ requested   AUTO       BATCHED    PER_SLOT
//   BATCHED              batched    batched    refused
//   PER_SLOT             per-slot   refused    per-slot
//   AUTO                 batched    batched    per-slot
#pragma once

#include <optional>

namespace xllm {

// Numbers are those of xllm_decode_mode in xllm.h.
enum class DecodeMode : int { kAuto = 0, kBatched = 1, kPerSlot = 2 };

// "AUTO", "BATCHED" or "PER_SLOT".
const char *decode_mode_name(DecodeMode mode);

// The cell of the table: the mode in effect, never kAuto; nothing where the cell says refused.
std::optional<DecodeMode> effective_decode_mode(DecodeMode engine, DecodeMode requested);

// The same for a call that needs an answer: a refused cell throws Error(kDecodeModeMismatch) with
// details engine_mode, requested_mode, call and remedy. `call` names the caller's operation.
DecodeMode resolve_decode_mode(DecodeMode engine, DecodeMode requested, const char *call);

// For a call that belongs to one of the two ways, on a slot that decodes in `slot` mode: another
// mode throws the same error, with detail slot_mode besides.
void check_slot_mode(DecodeMode engine, DecodeMode slot, DecodeMode requested, const char *call);

}  // namespace xllm
