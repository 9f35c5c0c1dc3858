// An accelerator made of threads, behind torch's PrivateUse1: what its parts share.
//
// Its memory is host memory, its kernels are torch's own for the CPU.  All else is as on a GPU: the host only queues work;
// every stream is a queue with a thread of its own; only events tie one to another; a freed block may be used again by the
// next allocation on its stream, whatever other streams do with it; copies from and to the host take their time.  What a GPU would do by chance
// once in a thousand runs can be made certain here: a stream can be held, a copy stopped after any number of bytes.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace queued {

constexpr int DEVICES = 2;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;

/// A moment in a queue, which comes once.
class Point {
 public:
  void reach();
  void wait();
  bool is_reached();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};
using PointPtr = std::shared_ptr<Point>;

/// A stream: work in order, on a thread of its own.
class Queue {
 public:
  void put(std::function<void()> work);
  PointPtr mark();
  void wait_for(PointPtr point);
  bool is_idle();
  std::atomic<int64_t> capture = 0; // the graph that takes what is queued here; 0: none

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool has_thread_ = false;
  bool is_busy_ = false;
};

/// What work held, when it is done, may be host tensors, and these Python objects: to release one takes the interpreter.
/// A thread that asks for it while it goes would abort the process, so from ``queued_leave`` on they stay.
void drop(std::function<void()> work);

Queue& queue_of(const c10::Stream& stream);
c10::Stream current_stream(int device);
c10::Stream set_current_stream(const c10::Stream& stream); // gives the one before
c10::Stream new_stream(int device);
int current_device();
int set_current_device(int device); // gives the one before
std::vector<Queue*> queues_of(int device);

/// Device memory.  Freed, its life ends where its stream gets to the next allocation on it: as with torch's caching
/// allocators, but there only if that one is of a like size.
struct Block {
  char* data = nullptr;
  size_t nbytes = 0;
  int device = 0;
  c10::StreamId stream = 0;
  // Under the lock of all blocks.
  bool is_dead = false;
  int users = 0;
  bool is_in_graph = false; // its memory is never used again
  std::vector<c10::Stream> also_used_on;
};
using BlockPtr = std::shared_ptr<Block>;
using Blocks = std::vector<BlockPtr>;

BlockPtr allocate(size_t nbytes); // on the current stream of the current device
void release(const BlockPtr& block);
void use_on(const BlockPtr& block, const c10::Stream& stream);
int64_t allocated(int device);

/// Queue a kernel.  What it throws is an error of the device, raised when somebody waits for it.
void launch(const c10::Stream& stream, Blocks blocks, std::function<void()> kernel);
/// The host waits for all that is queued there.
void synchronize(const c10::Stream& stream);
void raise_error_of(int device);

enum Direction { TO_HOST = 0, FROM_HOST = 1 };
/// Copies at the set rate, piece by piece, as far as the budget goes.  On a stream's thread.
void transfer(int device, Direction direction, char* into, const char* from, size_t nbytes);

/// Raises if an error was ordered for this kind of call.
void may_fail(const char* call);
/// As a runtime's last error: the next kernel that this thread launches raises it.
void set_last_error(int code);
/// A call that a runtime forbids, on any thread, while a stream is captured: that capture is broken.
void break_captures(const char* call);
/// What went wrong without anybody being told: a use after free.
void report(const std::string& what);
/// An operator that had to wait for its arguments, because the form of its results was not known without them.
void note_waiting_op(const std::string& name);

} // namespace queued
