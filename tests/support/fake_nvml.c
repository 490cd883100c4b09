/* What nvidia-ml-py calls of libnvidia-ml.so.1, for two devices whose state a test writes: tests/control/test_nvml.py. */
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15 };

struct device { int index; };
static struct device devices[2] = {{0}, {1}};
struct event { struct device *device; unsigned long long type, data; unsigned int gpu, compute; };

/* Written by the test. */
int fake_lost[2], fake_temperature[2] = {50, 50}, fake_rows_failed[2], fake_links[2] = {4, 4}, fake_ecc_supported = 1;
unsigned long long fake_uncorrected[2];
int fake_xid, fake_xid_device;

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned int flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "fake"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **out) { *out = &devices[index]; return SUCCESS; }
int nvmlDeviceGetUUID(struct device *d, char *out, unsigned int size) {
    snprintf(out, size, "GPU-%d", d->index);
    return SUCCESS;
}
int nvmlDeviceGetTemperature(struct device *d, int sensor, unsigned int *out) {
    *out = fake_temperature[d->index];
    return fake_lost[d->index] ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetTemperatureThreshold(struct device *d, int kind, unsigned int *out) { *out = 90; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(struct device *d, int type, int counter, unsigned long long *out) {
    *out = fake_uncorrected[d->index];
    return fake_ecc_supported ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetRemappedRows(struct device *d, unsigned int *c, unsigned int *u, unsigned int *p, unsigned int *f) {
    *c = *u = *p = 0;
    *f = fake_rows_failed[d->index];
    return SUCCESS;
}
int nvmlDeviceGetNvLinkState(struct device *d, unsigned int link, unsigned int *out) {
    *out = (int)link < fake_links[d->index];
    return link < 4 ? SUCCESS : NOT_SUPPORTED;
}
int nvmlEventSetCreate(void **set) { *set = devices; return SUCCESS; }
int nvmlDeviceRegisterEvents(struct device *d, unsigned long long types, void *set) { return SUCCESS; }
int nvmlEventSetWait_v2(void *set, struct event *out, unsigned int timeout) {
    if (!fake_xid) return TIMEOUT;
    memset(out, 0, sizeof *out);
    out->device = &devices[fake_xid_device];
    out->data = fake_xid;
    fake_xid = 0;
    return SUCCESS;
}
