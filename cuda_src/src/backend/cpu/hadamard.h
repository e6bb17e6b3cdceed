// A normalised Hadamard transform of a head (QuaRot, arXiv:2404.00456): what one channel holds is
// spread evenly over all, so that a large channel does not take the codes of its neighbours in a
// quantised cache. Applied to q and k alike it leaves their dot as it was; it is its own inverse.
#pragma once

namespace xllm::cpu {

// Channels [n] in place, in stretches of the largest power of two that divides n, at most 256. Sums
// and differences at distance 1, 2, 4, ..., then a product with f32(1 / sqrt(stretch)): nothing
// that a compiler could fuse or reorder, so the bytes are the same for every instruction set.
void hadamard(float *channels, int n);

}  // namespace xllm::cpu
