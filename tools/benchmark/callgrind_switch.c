/* Lets callgrind count a part of a process: Python cannot make valgrind's client requests itself. */
#include <valgrind/callgrind.h>

void counting_begin(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void counting_end(void) {
    CALLGRIND_DUMP_STATS_AT("step");
    CALLGRIND_STOP_INSTRUMENTATION;
}
