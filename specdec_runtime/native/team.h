// The threads of one pass: they share out tasks, stage by stage.
//
// The threads come from OpenMP, whose pool torch uses too. Its barriers are not used: a pass has a
// few hundred stages of some 50 us, and where other processes compete for the cores, waiting at
// each for a thread that is not running would cost a scheduler's time slice every time. Here a
// stage is over when its tasks are done, whoever did them. A thread that was away skips what it
// missed; only one that is away in the middle of a task is waited for.

#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// One thread's view of the team. All threads make the same calls in the same order.
class Team {
  public:
    // Calls body(task) for task = 0 .. count - 1, each once, by whichever thread is free; returns
    // when all are done. A thread that comes late may return at once, and others may by then be
    // stages ahead: what it prepares on its own between two calls must read only data that stays
    // as it is until the stages that use it are over.
    template <class Body>
    void share(int64_t count, Body body) {
        if (count == 0) return;
        uint64_t ticket = shared.ticket.load(std::memory_order_acquire);
        while (ticket >> 32 == stage) {
            const int64_t task = int64_t(ticket & 0xffffffffu);
            if (task == count) {
                wait_for_others();
                break;
            }
            if (!shared.ticket.compare_exchange_weak(ticket, ticket + 1)) continue;
            body(task);
            if (shared.finished.fetch_add(1) + 1 == count) start_next_stage();
            ticket = shared.ticket.load(std::memory_order_acquire);
        }
        ++stage;
    }

    // Runs body(team) on at most `threads` threads.
    template <class Body>
    static void run(int64_t threads, Body body) {
        Shared shared;
#pragma omp parallel num_threads(int(threads))
        {
            Team team(shared);
            body(team);
        }
    }

  private:
    // About 20 us: more than the usual difference between two threads at the end of a stage.
    static constexpr int SPINS = 1000;

    struct Shared {
        // Stage in the upper half, next task in the lower.
        alignas(64) std::atomic<uint64_t> ticket{0};
        alignas(64) std::atomic<int64_t> finished{0};
        alignas(64) std::atomic<uint32_t> changes{0};  // of the stage, to sleep on
    };
    Shared& shared;
    uint32_t stage = 0;

    explicit Team(Shared& shared) : shared(shared) {}

    bool is_current() const { return shared.ticket.load(std::memory_order_acquire) >> 32 == stage; }

    void start_next_stage() {
        shared.finished.store(0);
        shared.ticket.store(uint64_t(stage + 1) << 32);
        // Counted up, not set to the stage: a thread that is interrupted here may be overtaken.
        shared.changes.fetch_add(1);
        shared.changes.notify_all();
    }

    void wait_for_others() {
        for (int spin = 0; spin < SPINS && is_current(); ++spin) pause_briefly();
        for (;;) {
            const uint32_t seen = shared.changes.load();
            if (!is_current()) return;
            shared.changes.wait(seen);
        }
    }
};
