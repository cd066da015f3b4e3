// Branches, barriers and what else changes which instruction comes next. The scheduler executes them.
#include "build.h"

namespace ptx {
namespace {

void build_exit(Build& o) { o.i.kind = Kind::Exit; }
// Fences between proxies, of shared memory that wgmma reads: not modelled.
void build_fence(Build& o) {
  if (!o.has("proxy")) o.refuse("a fence between threads");
  o.i.kind = Kind::Nothing;
}

void build_barrier(Build& o) {
  if (o.has("warp")) {
    o.i.kind = Kind::WarpBarrier;
    return;
  }
  if (!o.has("sync")) o.refuse("a barrier without waiting");
  if (o.operands.size() > 1 && o.kernel.threads && o.number(1) != o.kernel.threads) o.refuse("a barrier of some warps");
  o.i.kind = Kind::Barrier;
  o.i.value = static_cast<u32>(o.number(0));
}

void build_grid(Build& o) { o.i.kind = o.has("wait") ? Kind::GridWait : Kind::GridLaunch; }

}  // namespace

void add_control(Builders& b) {
  b["ret"] = b["exit"] = &build_exit;
  b["bar"] = b["barrier"] = &build_barrier;
  b["griddepcontrol"] = &build_grid;
  b["fence"] = &build_fence;
}

const Builders& builders() {
  static const Builders all = [] {
    Builders b;
    add_memory(b);
    add_warp(b);
    add_matrix(b);
    add_control(b);
    return b;
  }();
  return all;
}

}  // namespace ptx
