/* An imitation of NVML: three GPUs of which the last is lost, and a part of the first one. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define UNKNOWN_GPU 6
#define NOT_SUPPORTED 3
#define LOST 15

typedef struct { const char *name, *uuid; unsigned busy; unsigned long long memory; int lost; } Gpu;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;

static Gpu gpus[] = {
    {"NVIDIA A", "GPU-aaaa-0000", 75, 40000000000ull, 0},
    {"NVIDIA A", "GPU-bbbb-1111", 5, 1000000000ull, 0},
    {"NVIDIA A", "GPU-cccc-2222", 0, 0, 1},
    {"NVIDIA A MIG 1g.10gb", "MIG-dddd", 101, 7000000000ull, 0},
};
static int opened = 0;

int nvmlInitWithFlags(unsigned flags) {
    while (getenv("HANGING_DRIVER")) pause();
    opened++;
    return getenv("BROKEN_DRIVER") ? 9 : 0;
}

int nvmlShutdown(void) { opened--; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) { *gpu = &gpus[index]; return 0; }

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
    for (int i = 0; i < 4; i++)
        if (!strcmp(gpus[i].uuid, uuid)) { *gpu = &gpus[i]; return 0; }
    return UNKNOWN_GPU;
}

int nvmlDeviceGetName(Gpu *gpu, char *name, unsigned length) {
    strcpy(name, getenv("TWO_KINDS") && gpu == gpus ? "NVIDIA B" : gpu->name);
    return 0;
}

int nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned length) { strcpy(uuid, gpu->uuid); return 0; }

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *rates) {
    if (gpu->lost || !opened) return LOST;
    if (gpu->busy > 100) return NOT_SUPPORTED;
    rates->gpu = gpu->busy;
    return 0;
}

int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory) {
    if (gpu->lost || !opened) return LOST;
    memory->used = gpu->memory;
    return 0;
}
