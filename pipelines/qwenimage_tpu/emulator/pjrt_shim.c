// A PJRT plugin that makes torch-tpu take a CPU for a TPU of one chip.
//
// It hands out the function table of a CPU plugin with these changes: the client ignores torch-tpu's TPU
// options, a TPU topology extension answers for one chip, and compilations, executions and transfers between
// host and device are counted. Compiled programs can also be written to a folder.
//
// Only what is used of the PJRT C API (openxla/xla, xla/pjrt/c/pjrt_c_api.h) is declared here. Within its major
// version 0 the API only appends, so that the positions below hold for every later minor version.

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef void error_t;  // opaque; NULL is success
typedef error_t *function_t(void *arguments);

enum position {  // in the function table
  ERROR_DESTROY = 0,
  ERROR_MESSAGE = 1,
  ERROR_GET_CODE = 2,
  PLUGIN_ATTRIBUTES = 4,
  CLIENT_CREATE = 10,
  CLIENT_COMPILE = 20,
  CLIENT_BUFFER_FROM_HOST_BUFFER = 22,
  EXECUTABLE_DESERIALIZE_AND_LOAD = 56,
  LOADED_EXECUTABLE_EXECUTE = 55,
  BUFFER_ON_DEVICE_SIZE_IN_BYTES = 64,
  BUFFER_TO_HOST_BUFFER = 70,
  BUFFER_COPY_RAW_TO_HOST = 96,
  TRANSFER_MANAGER_TRANSFER_DATA = 98,
  POSITIONS_USED = 99,
};
enum { TPU_TOPOLOGY_EXTENSION = 16, UNIMPLEMENTED = 12, MAX_FUNCTIONS = 512, MAX_PATH = 4096 };

struct extension {
  size_t struct_size;
  int type;
  struct extension *next;
};

struct api {
  size_t struct_size;
  struct extension *extensions;
  struct {
    size_t struct_size;
    struct extension *extensions;
    int major, minor;
  } version;
  function_t *functions[MAX_FUNCTIONS];
};

// The heads of the arguments that are read; what follows them is passed on untouched.
struct named_value {
  size_t struct_size; void *extensions; const char *name; size_t name_size; int type; const int64_t *array;
  size_t value_size;
};
struct plugin_attributes { size_t struct_size; void *extensions; const struct named_value *values; size_t count; };
struct client_create { size_t struct_size; void *extensions; const void *options; size_t option_count; };
struct program { size_t struct_size; void *extensions; const char *code; size_t code_size; };
struct client_compile {
  size_t struct_size; void *extensions; void *client; struct program *program; const char *options;
  size_t options_size;
};
struct from_host {
  size_t struct_size; void *extensions; void *client; const void *data; int type; const int64_t *dims;
  size_t dim_count; const int64_t *strides; size_t stride_count; int semantics; void *device; void *memory;
  void *layout; void *done; void *buffer;
};
struct device_size { size_t struct_size; void *extensions; void *buffer; size_t bytes; };
struct to_host { size_t struct_size; void *extensions; void *buffer; void *layout; void *to; size_t bytes; };
struct raw_to_host {
  size_t struct_size; void *extensions; void *buffer; void *to; int64_t offset; int64_t bytes;
};
struct transfer_data {
  size_t struct_size; void *extensions; void *manager; int index; const void *data; int64_t offset;
  int64_t bytes;
};
struct error_message {
  size_t struct_size; void *extensions; const error_t *error; const char *message; size_t message_size;
};
struct error_code { size_t struct_size; void *extensions; const error_t *error; int code; };
struct error_destroy { size_t struct_size; void *extensions; error_t *error; };

static struct api *cpu;     // the CPU plugin's own table
static struct api emulated;  // its copy, with our functions

// Counters -----------------------------------------------------------------------------------------------

// Python reads this as a ctypes structure of the same fields.
struct counts {
  int64_t compilations, cache_loads, executions;
  int64_t host_to_device, host_to_device_bytes, device_to_host, device_to_host_bytes;
};
static _Atomic int64_t compilations, cache_loads, executions;
static _Atomic int64_t host_to_device, host_to_device_bytes, device_to_host, device_to_host_bytes;

EXPORT void emulator_counts(struct counts *out) {
  *out = (struct counts){compilations, cache_loads, executions, host_to_device, host_to_device_bytes,
                         device_to_host, device_to_host_bytes};
}

static void count(_Atomic int64_t *calls, _Atomic int64_t *bytes, int64_t size) {
  ++*calls;
  *bytes += size;
}

// Capture ------------------------------------------------------------------------------------------------

static char capture_folder[MAX_PATH];

// Programs to compile from now on are written to this folder instead; an empty path ends it.
EXPORT void emulator_capture(const char *folder) {
  snprintf(capture_folder, sizeof capture_folder, "%s", folder);
}

static void write_file(int64_t number, const char *extension, const char *data, size_t size) {
  char path[MAX_PATH + 64];
  snprintf(path, sizeof path, "%s/%06lld.%s", capture_folder, (long long)number, extension);
  FILE *file = fopen(path, "wb");
  int complete = file && fwrite(data, 1, size, file) == size;
  if (file) complete = fclose(file) == 0 && complete;
  if (!complete) {
    fprintf(stderr, "the emulated TPU could not write %s\n", path);
    remove(path);
  }
}

// Errors of our own -----------------------------------------------------------------------------------------

struct own_error { char message[256]; };
static struct own_error own_errors[64];

static int is_own(const error_t *error) {
  return (const char *)error >= (const char *)own_errors &&
         (const char *)error < (const char *)(own_errors + sizeof own_errors / sizeof *own_errors);
}

static error_t *not_emulated(int index, const char *name) {
  struct own_error *error = &own_errors[index];
  snprintf(error->message, sizeof error->message,
           "the emulated TPU does not answer %s of the PJRT TPU topology extension; torch-tpu asks it since a"
           " newer version, so add it to pjrt_shim.c",
           name);
  return error;
}

static error_t *error_message(void *pointer) {
  struct error_message *arguments = pointer;
  if (!is_own(arguments->error)) return cpu->functions[ERROR_MESSAGE](pointer);
  arguments->message = ((const struct own_error *)arguments->error)->message;
  arguments->message_size = strlen(arguments->message);
  return NULL;
}

static error_t *error_get_code(void *pointer) {
  struct error_code *arguments = pointer;
  if (!is_own(arguments->error)) return cpu->functions[ERROR_GET_CODE](pointer);
  arguments->code = UNIMPLEMENTED;
  return NULL;
}

static error_t *error_destroy(void *pointer) {
  struct error_destroy *arguments = pointer;
  return is_own(arguments->error) ? NULL : cpu->functions[ERROR_DESTROY](pointer);
}

// The functions that are counted or changed -----------------------------------------------------------------

// torch-tpu writes its programs in the version of StableHLO that the plugin reads: libtpu 0.0.50's, so that
// what the TPU could not read is not written here either.
static const int64_t stablehlo_version[3] = {1, 16, 3};

static error_t *plugin_attributes(void *pointer) {
  static struct named_value values[32];
  struct plugin_attributes *arguments = pointer;
  error_t *error = cpu->functions[PLUGIN_ATTRIBUTES](pointer);
  if (error) return error;
  size_t count = arguments->count < 32 ? arguments->count : 32;
  memcpy(values, arguments->values, count * sizeof *values);
  for (size_t i = 0; i < count; ++i)
    if (values[i].value_size == 3 && strncmp(values[i].name, "stablehlo_current_version", values[i].name_size) == 0)
      values[i].array = stablehlo_version;
  arguments->values = values;
  arguments->count = count;
  return NULL;
}

static error_t *client_create(void *pointer) {
  // The CPU plugin refuses options that it does not know, and all that torch-tpu gives are the TPU's.
  struct client_create *arguments = pointer;
  arguments->options = NULL;
  arguments->option_count = 0;
  return cpu->functions[CLIENT_CREATE](pointer);
}

static error_t *client_compile(void *pointer) {
  const struct client_compile *arguments = pointer;
  int64_t number = ++compilations;
  if (capture_folder[0]) {
    write_file(number, "mlir", arguments->program->code, arguments->program->code_size);
    write_file(number, "options", arguments->options, arguments->options_size);
    // A program without code is what the CPU plugin refuses with an error of its own.
    arguments->program->code_size = 0;
  }
  return cpu->functions[CLIENT_COMPILE](pointer);
}

static error_t *deserialize_and_load(void *pointer) {
  error_t *error = cpu->functions[EXECUTABLE_DESERIALIZE_AND_LOAD](pointer);
  if (!error) ++cache_loads;
  return error;
}

static error_t *execute(void *pointer) {
  ++executions;
  return cpu->functions[LOADED_EXECUTABLE_EXECUTE](pointer);
}

static error_t *buffer_from_host(void *pointer) {
  struct from_host *arguments = pointer;
  error_t *error = cpu->functions[CLIENT_BUFFER_FROM_HOST_BUFFER](pointer);
  if (error) return error;
  struct device_size size = {sizeof size, NULL, arguments->buffer, 0};
  error_t *size_error = cpu->functions[BUFFER_ON_DEVICE_SIZE_IN_BYTES](&size);
  count(&host_to_device, &host_to_device_bytes, size.bytes);
  return size_error;
}

static error_t *transfer_data(void *pointer) {
  const struct transfer_data *arguments = pointer;
  count(&host_to_device, &host_to_device_bytes, arguments->bytes);
  return cpu->functions[TRANSFER_MANAGER_TRANSFER_DATA](pointer);
}

static error_t *buffer_to_host(void *pointer) {
  const struct to_host *arguments = pointer;
  // Without a target it only asks how many bytes one needs.
  if (arguments->to) count(&device_to_host, &device_to_host_bytes, arguments->bytes);
  return cpu->functions[BUFFER_TO_HOST_BUFFER](pointer);
}

static error_t *raw_to_host(void *pointer) {
  const struct raw_to_host *arguments = pointer;
  count(&device_to_host, &device_to_host_bytes, arguments->bytes);
  return cpu->functions[BUFFER_COPY_RAW_TO_HOST](pointer);
}

// The TPU topology of one chip --------------------------------------------------------------------------------

struct topology_count { size_t struct_size; const void *topology; int32_t count; };
struct topology_bounds {
  size_t struct_size; const void *topology; size_t capacity; int32_t *bounds; size_t dims;
};

static error_t *one(void *pointer) {
  ((struct topology_count *)pointer)->count = 1;
  return NULL;
}

static error_t *one_by_one_by_one(void *pointer) {
  struct topology_bounds *arguments = pointer;
  arguments->dims = arguments->capacity < 3 ? arguments->capacity : 3;
  for (size_t i = 0; i < arguments->dims; ++i) arguments->bounds[i] = 1;
  return NULL;
}

// In the extension's order; X(name) is a function that torch-tpu has not asked for on one chip.
#define TOPOLOGY_FUNCTIONS(X, ONE, BOUNDS)                                                               \
  X(subslice) X(is_subslice_topology) X(subslice_device_id_from_full_device_id) X(replace_host_bounds)   \
  X(is_enhanced_barrier_enabled) X(has_limited_ici_connectivity) X(is_reachable_over_limited_ici)        \
  ONE(process_count) ONE(chips_per_process) ONE(core_count_per_chip) ONE(chip_count) ONE(core_count)     \
  ONE(logical_device_count_per_process) ONE(logical_device_count) ONE(logical_device_count_per_chip)     \
  ONE(core_count_per_process) X(process_ids) X(logical_device_ids_on_process)                            \
  X(proc_id_and_idx_on_proc_for_chip) X(proc_id_and_idx_on_proc_for_logi_device)                         \
  X(process_coord_from_id) X(chip_id_from_coord) X(logical_device_id_from_chip_coord_and_idx)            \
  X(chip_coord_and_idx_for_logi_device) BOUNDS(chips_per_process_bounds) BOUNDS(chip_bounds)             \
  BOUNDS(process_bounds) X(get_routing_strategy) X(get_slice_config) X(get_slice_configs)                \
  X(get_default_platform_config)

#define NUMBER(name) NUMBER_##name,
enum { TOPOLOGY_FUNCTIONS(NUMBER, NUMBER, NUMBER) TOPOLOGY_FUNCTION_COUNT };

#define REFUSAL(name)                                       \
  static error_t *refuse_##name(void *arguments) {          \
    (void)arguments;                                        \
    return not_emulated(NUMBER_##name, #name);              \
  }
#define NOTHING(name)
TOPOLOGY_FUNCTIONS(REFUSAL, NOTHING, NOTHING)

#define REFUSE(name) refuse_##name,
#define ANSWER_ONE(name) one,
#define ANSWER_BOUNDS(name) one_by_one_by_one,
static struct {
  struct extension base;
  function_t *functions[TOPOLOGY_FUNCTION_COUNT];
} tpu_topology = {{sizeof tpu_topology, TPU_TOPOLOGY_EXTENSION, NULL},
                  {TOPOLOGY_FUNCTIONS(REFUSE, ANSWER_ONE, ANSWER_BOUNDS)}};

// The plugin --------------------------------------------------------------------------------------------------

static char failure[MAX_PATH];

// Why GetPjrtApi gave nothing.
EXPORT const char *emulator_failure(void) { return failure; }

static struct api *fail(const char *problem, const char *detail) {
  snprintf(failure, sizeof failure, "%s (%s)", problem, detail);
  return NULL;
}

EXPORT struct api *GetPjrtApi(void) {
  if (cpu) return &emulated;
  const char *path = getenv("QWENIMAGE_TPU_CPU_PLUGIN");
  if (!path) return fail("QWENIMAGE_TPU_CPU_PLUGIN must name the CPU's PJRT plugin", "not set");
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return fail("the CPU's PJRT plugin cannot be loaded", dlerror());
  struct api *(*get)(void) = (struct api * (*)(void)) dlsym(library, "GetPjrtApi");
  struct api *table = get ? get() : NULL;
  if (!table) return fail("the CPU's PJRT plugin gives no function table", path);
  size_t head = offsetof(struct api, functions);
  if (table->version.major != 0 || table->struct_size < head + POSITIONS_USED * sizeof(function_t *) ||
      table->struct_size > sizeof emulated)
    return fail("the CPU's PJRT plugin has another API than pjrt_shim.c knows", path);

  cpu = table;
  memcpy(&emulated, cpu, cpu->struct_size);
  tpu_topology.base.next = emulated.extensions;
  emulated.extensions = &tpu_topology.base;
  function_t **functions = emulated.functions;
  functions[ERROR_DESTROY] = error_destroy;
  functions[ERROR_MESSAGE] = error_message;
  functions[ERROR_GET_CODE] = error_get_code;
  functions[PLUGIN_ATTRIBUTES] = plugin_attributes;
  functions[CLIENT_CREATE] = client_create;
  functions[CLIENT_COMPILE] = client_compile;
  functions[CLIENT_BUFFER_FROM_HOST_BUFFER] = buffer_from_host;
  functions[EXECUTABLE_DESERIALIZE_AND_LOAD] = deserialize_and_load;
  functions[LOADED_EXECUTABLE_EXECUTE] = execute;
  functions[BUFFER_TO_HOST_BUFFER] = buffer_to_host;
  functions[BUFFER_COPY_RAW_TO_HOST] = raw_to_host;
  functions[TRANSFER_MANAGER_TRANSFER_DATA] = transfer_data;
  return &emulated;
}
