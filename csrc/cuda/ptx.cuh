// The instructions of Hopper that the sorts use, and where a kernel finds its shared memory.
#pragma once

#include <cstdint>

namespace moelora {

// Wait until the kernel before this one is complete and its writes are visible; before any access to global memory.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Let the next kernel start. After the wait: then this kernel vouches for everything before it.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The two halves of a barrier of all threads of the cluster: what was written before arriving, in global memory and in any
// CTA's shared memory, is visible after waiting.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The same place in the shared memory of another CTA of the cluster, which must have started and not ended.
template <typename T>
__device__ inline T* in_cta(T* pointer, int rank) {
  uint64_t mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(reinterpret_cast<uint64_t>(pointer)), "r"(rank));
  return reinterpret_cast<T*>(mapped);
}

__device__ inline char* shared_memory() {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<char*>(memory);
}

}  // namespace moelora
