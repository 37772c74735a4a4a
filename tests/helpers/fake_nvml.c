/* A libnvidia-ml.so.1 for machines without a GPU, built from NVIDIA's documentation (NVML API reference, release 13).

It has not been compared with a GPU yet: `python3 -m benchmarks.gpu` does, on a machine that has one. Each call reads
the file that FAKE_NVML names, "<gpu>.<what> <number>" a line: what the library says of each GPU. What is not in the file
this GPU does not support. "<gpu>.lost 1": it has fallen off the bus; "<gpu>.hang 1": a call never returns;
"driver 9": the driver is not loaded; "xid.<n> <gpu*1000+number>": the n-th error that a caller gets. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, LOST = 15 };

static int known(const char *key, long long *value) {
    char name[64];
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    int is_known = 0;
    while (file && !is_known && fscanf(file, "%63s %lld", name, value) == 2) is_known = !strcmp(name, key);
    if (file) fclose(file);
    return is_known;
}

static long long number(const char *key, long long usual) {
    long long value;
    return known(key, &value) ? value : usual;
}

/* A handle is the number of the GPU and one more; of a MIG device a hundred and one more. */
static int of(void *gpu, const char *what, long long *value) {
    char key[64];
    long long index = (intptr_t)gpu - 1;
    snprintf(key, sizeof key, "%lld.lost", index);
    if (number(key, 0)) return LOST;
    snprintf(key, sizeof key, "%lld.hang", index);
    while (number(key, 0)) pause();
    snprintf(key, sizeof key, "%lld.%s", index, what);
    return known(key, value) ? OK : NOT_SUPPORTED;
}

static int get(void *gpu, const char *what, unsigned *answer) {
    long long value = 0;
    int code = of(gpu, what, &value);
    if (code == OK) *answer = (unsigned)value;
    return code;
}

static int get_long(void *gpu, const char *what, unsigned long long *answer) {
    long long value = 0;
    int code = of(gpu, what, &value);
    if (code == OK) *answer = (unsigned long long)value;
    return code;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)number("driver", OK); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) {
    return code == LOST ? "GPU is lost" : code == NOT_SUPPORTED ? "Not Supported" : code == 9 ? "Driver Not Loaded" : "Error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.65.06"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)number("gpus", 0);
    return (int)number("driver", OK);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = (void *)(intptr_t)(index + 1); return OK; }
int nvmlDeviceGetName(void *gpu, char *text, unsigned size) {
    (void)gpu;
    snprintf(text, size, "NVIDIA H100 80GB HBM3");
    return OK;
}
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned size) {
    intptr_t index = (intptr_t)gpu - 1;
    snprintf(text, size, index < 100 ? "GPU-%08d" : "MIG-%08d", (int)index);
    return OK;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
int nvmlDeviceGetPciInfo_v3(void *gpu, struct pci *found) {
    memset(found, 0, sizeof *found);
    snprintf(found->text, sizeof found->text, "0000:%02x:00.0", (int)(intptr_t)gpu);
    return OK;
}
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *answer) { (void)sensor; return get(gpu, "temperature", answer); }
int nvmlDeviceGetTemperatureThreshold(void *gpu, int which, unsigned *answer) {
    return which == 1 ? get(gpu, "slowdown_temperature", answer) : NOT_SUPPORTED;
}
int nvmlDeviceGetClockInfo(void *gpu, int which, unsigned *answer) {
    return get(gpu, which == 1 ? "sm_clock" : which == 2 ? "memory_clock" : "?", answer);
}
int nvmlDeviceGetMaxClockInfo(void *gpu, int which, unsigned *answer) {
    return get(gpu, which == 1 ? "max_sm_clock" : "?", answer);
}
int nvmlDeviceGetCurrentClocksEventReasons(void *gpu, unsigned long long *answer) { return get_long(gpu, "reasons", answer); }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *answer) { return get(gpu, "power_mw", answer); }
int nvmlDeviceGetEnforcedPowerLimit(void *gpu, unsigned *answer) { return get(gpu, "power_limit_mw", answer); }
int nvmlDeviceGetPcieReplayCounter(void *gpu, unsigned *answer) { return get(gpu, "pcie_replays", answer); }
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *gpu, struct memory *found) {
    int code = get_long(gpu, "memory_used", &found->used);
    if (code == OK) code = get_long(gpu, "memory_total", &found->total);
    return code;
}
struct rates { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *gpu, struct rates *found) { return get(gpu, "utilization", &found->gpu); }
int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int period, unsigned long long *answer) {
    static const char *names[2][2] = {{"corrected", "lifetime_corrected"}, {"uncorrected", "lifetime_uncorrected"}};
    return get_long(gpu, names[kind][period], answer);
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *gpu, int *pending) { return get(gpu, "page_pending", (unsigned *)pending); }
int nvmlDeviceGetRetiredPages(void *gpu, int cause, unsigned *count, unsigned long long *pages) {
    unsigned found = 0;
    int code = get(gpu, cause ? "retired_double" : "retired_single", &found);
    if (code != OK) return code;
    if (pages == NULL && found) code = INSUFFICIENT_SIZE;
    for (unsigned page = 0; pages != NULL && page < found; page++) pages[page] = page;
    *count = found;
    return code;
}
int nvmlDeviceGetRemappedRows(void *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    int code = get(gpu, "rows_corrected", corrected);
    if (code == OK) code = get(gpu, "rows_uncorrected", uncorrected);
    if (code == OK) code = get(gpu, "rows_pending", pending);
    return code == OK ? get(gpu, "rows_failed", failed) : code;
}
struct field { uint32_t id, scope; int64_t at, latency; int type, code; union { unsigned u; unsigned long long ull; } value; };
int nvmlDeviceGetFieldValues(void *gpu, int count, struct field *fields) {
    for (int place = 0; place < count; place++) {
        char key[32];
        struct field *one = fields + place;
        snprintf(key, sizeof key, "field.%u", one->id);
        one->type = one->id >= 32 && one->id < 80 ? 3 : 1;
        one->code = one->type == 3 ? get_long(gpu, key, &one->value.ull) : get(gpu, key, &one->value.u);
        if (one->code == LOST) return LOST;
    }
    return OK;
}
int nvmlDeviceGetMigMode(void *gpu, unsigned *now, unsigned *next) { *next = 0; return get(gpu, "mig", now); }
int nvmlDeviceGetMaxMigDeviceCount(void *gpu, unsigned *count) { return get(gpu, "mig", count) ? NOT_SUPPORTED : (*count = 7, OK); }
int nvmlDeviceGetMigDeviceHandleByIndex(void *gpu, unsigned index, void **device) {
    if (index > 1) return NOT_FOUND;
    *device = (void *)(intptr_t)(100 * (intptr_t)gpu + index + 1);
    return OK;
}

static int next_xid;
int nvmlEventSetCreate(void **events) { *events = &next_xid; return number("no_events", 0) ? NOT_SUPPORTED : OK; }
int nvmlEventSetFree(void *events) { (void)events; return OK; }
int nvmlDeviceRegisterEvents(void *gpu, unsigned long long kinds, void *events) {
    (void)gpu, (void)events;
    return kinds == 8 ? OK : NOT_SUPPORTED;
}
struct event { void *gpu; unsigned long long kind, data; unsigned instance, compute; };
int nvmlEventSetWait_v2(void *events, struct event *found, unsigned timeout_ms) {
    (void)events;
    for (unsigned waited = 0;; waited += 5) {
        char key[32];
        long long value;
        snprintf(key, sizeof key, "xid.%d", next_xid);
        if (known(key, &value)) {
            next_xid++;
            *found = (struct event){(void *)(intptr_t)(value / 1000 + 1), 8, (unsigned long long)(value % 1000), 0, 0};
            return OK;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(5000);
    }
}
