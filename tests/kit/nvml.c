/* A driver library that NVIDIA's Python binding loads by its name, as one of five machines that FAKE_NVML names:
   "alike" (two H200), "unlike" (an L4 in the first slot, an H200 in the second), "divided" (an H200 in MIG mode with
   two instances), "orphaned" (the same, but no instance says whose it is), "old" (one GPU that knows neither energy nor
   power of the instant). Layouts and numbers: nvml.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { POWER_INSTANT = 186, MIB = 1 << 20 };
typedef struct { int number, instance; } Device; /* instance 0: the whole */
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } Process;
typedef union { double d; unsigned int u; unsigned long long l; } Value;
typedef struct {
    unsigned int field, scope; long long timestamp, latency; unsigned int type; int result; Value value;
} Field;

static Device devices[2][3] = {{{0, 0}, {0, 1}, {0, 2}}, {{1, 0}, {1, 1}, {1, 2}}};
static unsigned long long reads;

static int is(const char *name) {
    const char *machine = getenv("FAKE_NVML");
    return machine && !strcmp(machine, name);
}
static int part(Device *d) { return d->instance > 0; }

int nvmlInitWithFlags(unsigned int flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int result) { return result == NOT_SUPPORTED ? "Not Supported" : "an error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int length) { snprintf(text, length, "580.1"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = is("alike") || is("unlike") ? 2 : 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) { *device = devices[index]; return SUCCESS; }

int nvmlDeviceGetUUID(Device *d, char *text, unsigned int length) {
    snprintf(text, length, part(d) ? "MIG-%d%d" : "GPU-%d", d->number, d->instance);
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 3; i++) {
            char own[96];
            nvmlDeviceGetUUID(&devices[n][i], own, sizeof own);
            if (!strcmp(own, uuid) && (!i || is("divided") || is("orphaned"))) { *device = &devices[n][i]; return SUCCESS; }
        }
    return NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *d, Device **whole) {
    *whole = devices[d->number];
    return is("orphaned") ? NOT_SUPPORTED : part(d) ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetName(Device *d, char *text, unsigned int length) {
    snprintf(text, length, is("unlike") && !d->number ? "NVIDIA L4" : "NVIDIA H200");
    return SUCCESS;
}
int nvmlDeviceGetTotalEnergyConsumption(Device *d, unsigned long long *mj) {
    *mj = 7000000000ULL + 50 * reads++; /* beyond what 32 bits hold */
    return is("old") || part(d) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetPowerUsage(Device *d, unsigned int *mw) { *mw = 500000; return part(d) ? NOT_SUPPORTED : SUCCESS; }
int nvmlDeviceGetFieldValues(Device *d, int count, Field *fields) {
    for (int n = 0; n < count; n++) {
        fields[n].result = is("old") || part(d) || fields[n].field != POWER_INSTANT ? NOT_SUPPORTED : SUCCESS;
        fields[n].type = 1;
        fields[n].value.u = 623456;
    }
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(Device *d, int kind, unsigned int *mhz) {
    *mhz = kind == 1 ? 1980 : 3201; /* SM, memory */
    return part(d) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, unsigned long long *mask) { *mask = 4; return SUCCESS; }
int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned int *degrees) { *degrees = 61; return SUCCESS; }
int nvmlDeviceGetMemoryInfo(Device *d, Memory *memory) {
    memory->total = (part(d) ? 17ULL : 141ULL) * 1024 * MIB;
    memory->used = (part(d) ? 9ULL : 100ULL) * 1024 * MIB;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(Device *d, Utilization *use) {
    use->gpu = 97, use->memory = 40;
    return is("divided") ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned int *mw) { *mw = 700000; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkGeneration(Device *d, unsigned int *generation) { *generation = 5; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkWidth(Device *d, unsigned int *width) { *width = 16; return SUCCESS; }
int nvmlDeviceGetPcieThroughput(Device *d, int way, unsigned int *kb) { *kb = way ? 2000 : 1000; return SUCCESS; }
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned int *count, Process *found) {
    if (is("divided") != part(d)) { *count = 0; return SUCCESS; }
    if (!found) { *count = 1; return INSUFFICIENT_SIZE; }
    *count = 1;
    found[0] = (Process){4000 + 10 * d->number + d->instance, 1ULL << 30, 0, 0};
    return SUCCESS;
}
