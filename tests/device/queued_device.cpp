// The device itself: streams, memory, copies, errors; and the plain C functions through which tests govern it.
#include "queued.hpp"

#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory_resource>
#include <set>
#include <shared_mutex>
#include <thread>

namespace queued {

// --- streams ---------------------------------------------------------------------------------

void Point::reach() {
  std::lock_guard lock(mutex_);
  reached_ = true;
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

bool Point::is_reached() {
  std::lock_guard lock(mutex_);
  return reached_;
}

void Queue::put(std::function<void()> work) {
  std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([this] { run(); }).detach();
  }
  changed_.notify_all();
}

PointPtr Queue::mark() {
  auto point = std::make_shared<Point>();
  put([point] { point->reach(); });
  return point;
}

void Queue::wait_for(PointPtr point) {
  put([point = std::move(point)] { point->wait(); });
}

bool Queue::is_idle() {
  std::lock_guard lock(mutex_);
  return work_.empty() && !is_busy_;
}

void Queue::run() {
  while (true) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      is_busy_ = false;
      changed_.wait(lock, [this] { return !work_.empty(); });
      is_busy_ = true;
      work = std::move(work_.front());
      work_.pop_front();
    }
    work();
    drop(std::move(work));
  }
}

namespace {

struct Engine { // one direction of a device's copies
  std::mutex mutex;
  std::condition_variable changed;
  double bytes_s = 0; // 0: as fast as it goes
  int64_t budget = -1; // -1: no limit
  int64_t copied = 0;
};

struct Ordered {
  int64_t times; // -1: for ever
  bool is_out_of_memory;
};

using Freed = std::pair<BlockPtr, std::vector<PointPtr>>; // and where other streams were done with it

// Never destroyed: the threads of the streams live as long as the process.
struct World {
  std::mutex streams_mutex;
  std::vector<Queue*> queues[DEVICES];
  Engine engines[DEVICES][2];

  std::mutex blocks_mutex;
  std::condition_variable blocks_changed;
  std::map<std::pair<int, c10::StreamId>, std::vector<Freed>> freed; // by the stream that allocated
  int64_t allocated[DEVICES] = {};
  int64_t limit[DEVICES] = {-1, -1};

  std::shared_mutex drop_mutex;
  bool is_leaving = false;

  std::mutex notes_mutex;
  std::map<std::string, Ordered> ordered;
  std::string error[DEVICES];
  std::vector<std::string> reports;
  std::set<std::string> waiting_ops;
  std::map<int64_t, PointPtr> gates;
  int64_t last_gate = 0;

  struct Graph {
    Queue* queue = nullptr; // while it is captured
    std::string broken;
    std::vector<std::pair<Blocks, std::function<void()>>> kernels;
  };
  std::map<int64_t, Graph> graphs; // under the mutex of the notes
};

World& world() {
  static World* one = new World;
  return *one;
}

thread_local int this_device = 0;
thread_local int last_error = 0;
thread_local c10::StreamId this_stream[DEVICES] = {};

c10::Stream stream(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, static_cast<c10::DeviceIndex>(device)), id);
}

int checked(int device) {
  TORCH_CHECK(device >= 0 && device < DEVICES, "there is no device ", device);
  return device;
}

} // namespace

void drop(std::function<void()> work) {
  std::shared_lock lock(world().drop_mutex);
  if (world().is_leaving) {
    new std::function<void()>(std::move(work));
  }
  work = nullptr; // while the lock is held: a parameter outlives the locals
}

Queue& queue_of(const c10::Stream& stream) {
  auto& all = world();
  const int device = checked(stream.device_index());
  std::lock_guard lock(all.streams_mutex);
  auto& queues = all.queues[device];
  if (queues.empty()) {
    queues.push_back(new Queue); // the default stream
  }
  TORCH_CHECK(stream.id() >= 0 && stream.id() < static_cast<int64_t>(queues.size()), "no such stream: ", stream);
  return *queues[static_cast<size_t>(stream.id())];
}

c10::Stream new_stream(int device) {
  may_fail("stream");
  queue_of(stream(device, 0));
  auto& all = world();
  std::lock_guard lock(all.streams_mutex);
  all.queues[device].push_back(new Queue);
  return stream(device, static_cast<c10::StreamId>(all.queues[device].size()) - 1);
}

c10::Stream current_stream(int device) {
  return stream(checked(device), this_stream[device]);
}

c10::Stream set_current_stream(const c10::Stream& next) {
  const int device = checked(next.device_index());
  const auto before = this_stream[device];
  this_stream[device] = next.id();
  return stream(device, before);
}

int current_device() {
  return this_device;
}

int set_current_device(int device) {
  return std::exchange(this_device, checked(device));
}

std::vector<Queue*> queues_of(int device) {
  auto& all = world();
  std::lock_guard lock(all.streams_mutex);
  return all.queues[checked(device)];
}

// --- memory ----------------------------------------------------------------------------------

namespace {

/// The device's memory is its own: in the heap it would lie between torch's objects, and these in other places than with
/// a GPU.  What asks many tensors something would take longer, only for that.
class Pages final : public std::pmr::memory_resource {
  void* do_allocate(size_t nbytes, size_t) override {
    void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      throw std::bad_alloc();
    }
    return data;
  }
  void do_deallocate(void* data, size_t nbytes, size_t) override {
    munmap(data, nbytes);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override {
    return this == &other;
  }
};

constexpr size_t ALIGNMENT = 64;

size_t aligned(size_t nbytes) {
  return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

std::pmr::memory_resource& memory() {
  static auto* one = new std::pmr::synchronized_pool_resource({0, 64 << 10}, new Pages);
  return *one;
}

/// What was freed may be used again from here on.  On the thread of the stream that allocated it.
void bury(const Block& block) {
  auto& all = world();
  std::unique_lock lock(all.blocks_mutex);
  if (block.users) {
    report("a block of " + std::to_string(block.nbytes) + " bytes was used again while another stream used it");
  }
  all.blocks_changed.wait(lock, [&] { return block.users == 0; });
  memory().deallocate(block.data, aligned(block.nbytes), ALIGNMENT);
}

void bury_freed(int device, c10::StreamId id) {
  std::vector<Freed> freed;
  {
    std::lock_guard lock(world().blocks_mutex);
    freed.swap(world().freed[{device, id}]);
  }
  if (!freed.empty()) {
    queue_of(stream(device, id)).put([freed] {
      for (const auto& [block, points] : freed) {
        for (const auto& point : points) {
          point->wait();
        }
        {
          std::lock_guard lock(world().blocks_mutex);
          block->is_dead = true;
        }
        bury(*block);
      }
    });
  }
}

} // namespace

BlockPtr allocate(size_t nbytes) {
  may_fail("allocate");
  auto& all = world();
  auto block = std::make_shared<Block>();
  block->nbytes = nbytes;
  block->device = this_device;
  block->stream = this_stream[this_device];
  {
    std::lock_guard lock(all.blocks_mutex);
    const auto limit = all.limit[block->device];
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        limit < 0 || all.allocated[block->device] + static_cast<int64_t>(nbytes) <= limit,
        "queued: out of memory: ", nbytes, " bytes");
    all.allocated[block->device] += static_cast<int64_t>(nbytes);
  }
  bury_freed(block->device, block->stream);
  block->data = static_cast<char*>(memory().allocate(aligned(nbytes), ALIGNMENT));
  std::memset(block->data, 0xA5, nbytes); // nobody may take it for zeros
  return block;
}

void use_on(const BlockPtr& block, const c10::Stream& stream) {
  std::lock_guard lock(world().blocks_mutex);
  block->also_used_on.push_back(stream);
}

void release(const BlockPtr& block) {
  std::vector<c10::Stream> others;
  {
    std::lock_guard lock(world().blocks_mutex);
    others = block->also_used_on;
  }
  std::vector<PointPtr> points;
  for (const auto& other : others) {
    points.push_back(queue_of(other).mark());
  }
  std::lock_guard lock(world().blocks_mutex);
  world().allocated[block->device] -= static_cast<int64_t>(block->nbytes);
  if (block->is_in_graph) {
    return;
  }
  world().freed[{block->device, block->stream}].emplace_back(block, std::move(points));
}

int64_t allocated(int device) {
  std::lock_guard lock(world().blocks_mutex);
  return world().allocated[checked(device)];
}

// --- work ------------------------------------------------------------------------------------

void launch(const c10::Stream& stream, Blocks blocks, std::function<void()> kernel) {
  may_fail("launch");
  const int code = std::exchange(last_error, 0);
  TORCH_CHECK(code == 0, "queued: an earlier call of this thread failed: error ", code);
  const int device = stream.device_index();
  if (const auto number = queue_of(stream).capture.load()) {
    std::scoped_lock lock(world().notes_mutex, world().blocks_mutex);
    for (const auto& block : blocks) {
      block->is_in_graph = true;
    }
    world().graphs.at(number).kernels.emplace_back(std::move(blocks), std::move(kernel));
    return;
  }
  queue_of(stream).put([device, blocks = std::move(blocks), kernel = std::move(kernel)] {
    auto& all = world();
    bool are_alive = true;
    {
      std::lock_guard lock(all.blocks_mutex);
      for (const auto& block : blocks) {
        if (block->is_dead) {
          are_alive = false;
          report("a kernel used a block of " + std::to_string(block->nbytes) + " bytes after it was freed");
        }
        block->users++;
      }
    }
    if (are_alive) {
      try {
        kernel();
      } catch (const std::exception& error) {
        std::lock_guard lock(all.notes_mutex);
        if (all.error[device].empty()) {
          all.error[device] = error.what();
        }
      }
    }
    std::lock_guard lock(all.blocks_mutex);
    for (const auto& block : blocks) {
      block->users--;
    }
    all.blocks_changed.notify_all();
  });
}

void raise_error_of(int device) {
  std::string error;
  {
    std::lock_guard lock(world().notes_mutex);
    error = std::exchange(world().error[device], "");
  }
  TORCH_CHECK(error.empty(), "queued: a kernel failed: ", error);
}

void synchronize(const c10::Stream& stream) {
  may_fail("synchronize");
  break_captures("synchronize");
  queue_of(stream).mark()->wait();
  raise_error_of(stream.device_index());
}

void transfer(int device, Direction direction, char* into, const char* from, size_t nbytes) {
  constexpr size_t PIECE = 64 * 1024;
  auto& engine = world().engines[device][direction];
  auto due = std::chrono::steady_clock::now();
  for (size_t at = 0; at < nbytes;) {
    size_t count = std::min(PIECE, nbytes - at);
    double bytes_s = 0;
    {
      std::unique_lock lock(engine.mutex);
      engine.changed.wait(lock, [&] { return engine.budget != 0; });
      if (engine.budget > 0) {
        count = std::min(count, static_cast<size_t>(engine.budget));
        engine.budget -= static_cast<int64_t>(count);
      }
      bytes_s = engine.bytes_s;
    }
    if (bytes_s > 0) {
      due += std::chrono::nanoseconds(static_cast<int64_t>(1e9 * static_cast<double>(count) / bytes_s));
      std::this_thread::sleep_until(due);
    }
    std::memcpy(into + at, from + at, count);
    at += count;
    std::lock_guard lock(engine.mutex);
    engine.copied += static_cast<int64_t>(count);
  }
}

// --- errors ----------------------------------------------------------------------------------

void may_fail(const char* call) {
  auto& all = world();
  bool is_out_of_memory = false;
  {
    std::lock_guard lock(all.notes_mutex);
    auto found = all.ordered.find(call);
    if (found == all.ordered.end()) {
      return;
    }
    is_out_of_memory = found->second.is_out_of_memory;
    if (found->second.times > 0 && --found->second.times == 0) {
      all.ordered.erase(found);
    }
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !is_out_of_memory, "queued: out of memory (ordered, in ", call, ")");
  TORCH_CHECK(false, "queued: device error (ordered, in ", call, ")");
}

void set_last_error(int code) {
  last_error = code;
}

void break_captures(const char* call) {
  std::lock_guard lock(world().notes_mutex);
  for (auto& [number, graph] : world().graphs) {
    if (graph.queue != nullptr && graph.broken.empty()) {
      graph.broken = call;
    }
  }
}

void report(const std::string& what) {
  std::lock_guard lock(world().notes_mutex);
  world().reports.push_back(what);
}

void note_waiting_op(const std::string& name) {
  std::lock_guard lock(world().notes_mutex);
  world().waiting_ops.insert(name);
}

} // namespace queued

// --- for tests, by ctypes ----------------------------------------------------------------------

using namespace queued;

namespace {

int64_t give(const std::string& text, char* into, int64_t room) {
  return static_cast<int64_t>(text.copy(into, static_cast<size_t>(room)));
}

} // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

/// Hold a stream from here on; gives the number of the gate.
EXPORTED int64_t queued_hold(int device, int64_t stream_id) {
  auto gate = std::make_shared<Point>();
  queue_of(stream(device, stream_id)).wait_for(gate);
  auto& all = world();
  std::lock_guard lock(all.notes_mutex);
  all.gates[++all.last_gate] = gate;
  return all.last_gate;
}

/// Open a gate; -1: all.
EXPORTED void queued_open(int64_t number) {
  auto& all = world();
  std::lock_guard lock(all.notes_mutex);
  for (auto gate = all.gates.begin(); gate != all.gates.end();) {
    if (number < 0 || gate->first == number) {
      gate->second->reach();
      gate = all.gates.erase(gate);
    } else {
      ++gate;
    }
  }
}

/// The interpreter is about to go.  Blocks while a stream's thread asks it for something, for the last time.
EXPORTED void queued_leave() {
  std::unique_lock lock(world().drop_mutex);
  world().is_leaving = true;
}

EXPORTED int queued_is_idle(int device, int64_t stream_id) {
  return queue_of(stream(device, stream_id)).is_idle();
}

/// 0: as fast as it goes.
EXPORTED void queued_set_rate(int device, int direction, double bytes_s) {
  auto& engine = world().engines[checked(device)][direction];
  std::lock_guard lock(engine.mutex);
  engine.bytes_s = bytes_s;
}

/// How many more bytes are copied before all copies in this direction stop; -1: no limit.
EXPORTED void queued_set_budget(int device, int direction, int64_t nbytes) {
  auto& engine = world().engines[checked(device)][direction];
  std::lock_guard lock(engine.mutex);
  engine.budget = nbytes;
  engine.changed.notify_all();
}

EXPORTED int64_t queued_copied(int device, int direction) {
  auto& engine = world().engines[checked(device)][direction];
  std::lock_guard lock(engine.mutex);
  return engine.copied;
}

/// Of allocate, launch, copy, record, wait, synchronize, stream: fail so often, -1 for ever, 0 no more.
EXPORTED void queued_fail(const char* call, int64_t times, int is_out_of_memory) {
  auto& all = world();
  std::lock_guard lock(all.notes_mutex);
  if (times == 0) {
    all.ordered.erase(call);
  } else {
    all.ordered[call] = {times, is_out_of_memory != 0};
  }
}

EXPORTED void queued_set_limit(int device, int64_t nbytes) {
  std::lock_guard lock(world().blocks_mutex);
  world().limit[checked(device)] = nbytes;
}

EXPORTED int64_t queued_allocated(int device) {
  return allocated(device);
}

/// From here on the stream runs nothing: a graph takes what is queued, as with CUDA's capture mode "global".
EXPORTED int64_t queued_begin_capture(int device, int64_t stream_id) {
  auto& queue = queue_of(stream(device, stream_id));
  auto& all = world();
  std::lock_guard lock(all.notes_mutex);
  const auto number = static_cast<int64_t>(all.graphs.size()) + 1;
  all.graphs[number].queue = &queue;
  queue.capture = number;
  return number;
}

/// What broke it; nothing if it is a graph now.
EXPORTED int64_t queued_end_capture(int64_t number, char* into, int64_t room) {
  auto& all = world();
  std::lock_guard lock(all.notes_mutex);
  auto& graph = all.graphs.at(number);
  std::exchange(graph.queue, nullptr)->capture = 0;
  return give(graph.broken, into, room);
}

EXPORTED int queued_is_capturing(int device, int64_t stream_id) {
  return queue_of(stream(device, stream_id)).capture.load() != 0;
}

EXPORTED void queued_replay(int64_t number, int device, int64_t stream_id) {
  decltype(World::Graph::kernels) kernels;
  {
    std::lock_guard lock(world().notes_mutex);
    kernels = world().graphs.at(number).kernels;
  }
  for (auto& [blocks, kernel] : kernels) {
    launch(stream(device, stream_id), blocks, kernel);
  }
}

/// Which uses after free there were since this was last asked, in lines.
EXPORTED int64_t queued_take_reports(char* into, int64_t room) {
  auto& all = world();
  std::lock_guard lock(all.notes_mutex);
  std::string text;
  for (const auto& each : std::exchange(all.reports, {})) {
    text += each + "\n";
  }
  return give(text, into, room);
}

/// Which operators have waited on the host.
EXPORTED int64_t queued_waiting_ops(char* into, int64_t room) {
  auto& all = world();
  std::lock_guard lock(all.notes_mutex);
  std::string text;
  for (const auto& each : all.waiting_ops) {
    text += each + "\n";
  }
  return give(text, into, room);
}
}
