/* What a hook does at every step, without an interpreter's frames: the clock, and records written into the mapped file.

The same as `appender.py`, `calls.py`, `vllm/steps.py` and `vllm/answers.py` in Python, which run where this was not
built: each has the other's tests. Everything here holds the interpreter's lock from its first look at the file's end to its last byte, so
two threads never write into one place; a signal's handler, which may close the file, runs between two calls.
Only functions of the limited API are used, but for the vector calls that joined it with Python 3.12. */

#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <Python.h>
#include <structmember.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif
#ifndef Py_TPFLAGS_METHOD_DESCRIPTOR
#define Py_TPFLAGS_METHOD_DESCRIPTOR (1UL << 17)
#endif

enum { STEP_KIND = 4, SPAN_KIND = 2, EMIT_KIND = 5 };
enum { HEAD_SIZE = 8, SPAN_SIZE = 40, STEP_SIZE = 56, ENTRY_SIZE = 20, EMIT_SIZE = 24, EMISSION_SIZE = 8 };

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- the file */

typedef struct {
  PyObject_HEAD
  char *base;
  Py_ssize_t pos, size, mapped; /* records go up to `size`: 0 once the file is closed */
} Appender;

static PyTypeObject *appender_type;
static PyObject *method_type;

/* What is asked of other objects, by name. */
enum {
  N_GROW, N_WRITER, N_DONE_CALLBACK, N_SEQ, N_TOTAL, N_TOKENS, N_NEW, N_CACHED, N_REQ_ID, N_COMPUTED, N_REQ_IDS, N_RUNNING,
  N_WAITING, N_SKIPPED, N_FREE, N_OUTPUTS, N_NEW_IDS, N_REQUEST_ID, N_HAS_WORK, N_NUM_TOKENS, N_FINISH, N_RECEIVED,
  N_COLLECTOR, N_PUT, N_REF, N_FINISHED, N_CALL, N_BODY, N_GENERATIONS, N_OPENED, N_WRITTEN, N_OUTPUT, N_TAKEN, NAMES
};
static const char *const spelled[NAMES] = {
    "_grow", "writer", "add_done_callback", "gapmeter_seq", "total_num_scheduled_tokens", "num_scheduled_tokens",
    "scheduled_new_reqs", "scheduled_cached_reqs", "req_id", "num_computed_tokens", "req_ids", "running",
    "waiting", "skipped_waiting", "num_free_blocks", "outputs", "new_token_ids", "request_id", "has_work", "num_tokens",
    "finish_reason", "received", "collector", "put", "ref", "finished", "gapmeter_call", "body", "generations", "opened",
    "written", "output", "gapmeter_ns"};
static PyObject *names[NAMES];

/* ---- objects of ours */

/* What those begin with that the collector has to know: how many objects they hold, and these in a row. */
#define HOLDS PyObject_HEAD Py_ssize_t holds;
typedef struct {
  HOLDS
  PyObject *held[];
} Holder;

/* A new one, all of it zero. */
static void *allocate(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

static void *holder(PyTypeObject *type, Py_ssize_t holds) {
  Holder *self = allocate(type);
  if (self)
    self->holds = holds;
  return self;
}

static void release(void *object) {
  PyTypeObject *type = Py_TYPE((PyObject *)object);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static int holder_traverse(PyObject *object, visitproc visit, void *arg) {
  Holder *self = (Holder *)object;
  Py_VISIT(Py_TYPE(object));
  for (Py_ssize_t k = 0; k < self->holds; k++)
    Py_VISIT(self->held[k]);
  return 0;
}

static int holder_clear(PyObject *object) {
  Holder *self = (Holder *)object;
  for (Py_ssize_t k = 0; k < self->holds; k++)
    Py_CLEAR(self->held[k]);
  return 0;
}

static void holder_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  holder_clear(object);
  release(object);
}

static PyObject *own(PyObject *object) {
  Py_INCREF(object);
  return object;
}

/* An exception that is put aside. */
typedef struct {
  PyObject *type, *value, *trace;
} Raised;

static Raised put_aside(void) {
  Raised raised;
  PyErr_Fetch(&raised.type, &raised.value, &raised.trace);
  return raised;
}

static void forget(Raised raised) {
  Py_XDECREF(raised.type);
  Py_XDECREF(raised.value);
  Py_XDECREF(raised.trace);
}

static void raise_again(Raised raised) { PyErr_Restore(raised.type, raised.value, raised.trace); }

/* ---- records */

/* `size` fresh bytes; NULL when there is no room to record into, or with an exception. */
static char *reserve(Appender *self, Py_ssize_t size) {
  while (self->pos + size + HEAD_SIZE > self->size) {
    PyObject *wanted = PyLong_FromSsize_t(size);
    PyObject *grown = wanted ? PyObject_CallMethodObjArgs((PyObject *)self, names[N_GROW], wanted, NULL) : NULL;
    Py_XDECREF(wanted);
    int room = grown ? PyObject_IsTrue(grown) : -1;
    Py_XDECREF(grown);
    if (room <= 0)
      return NULL;
  }
  char *at = self->base + self->pos;
  self->pos += size;
  return at;
}

/* A record that turned out to be none leaves no hole, which would end the file for its reader. */
static void give_back(Appender *self, char *at, Py_ssize_t size) {
  if (self->base + self->pos == at + size) {
    memset(at, 0, (size_t)size);
    self->pos -= size;
  }
}

static void put16(char *at, uint16_t value) { memcpy(at, &value, 2); }
static void put32(char *at, uint32_t value) { memcpy(at, &value, 4); }
static void put64(char *at, int64_t value) { memcpy(at, &value, 8); }

/* A frame is there once its size is: whatever ends the process before leaves nothing half written. */
static void put_head(char *at, Py_ssize_t size, uint16_t kind, uint16_t code) {
  put16(at + 4, kind);
  put16(at + 6, code);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  put32(at, (uint32_t)size);
}

static int to_u32(PyObject *number, uint32_t *value) {
  unsigned long long wide = PyLong_AsUnsignedLongLong(number);
  if (wide == (unsigned long long)-1 && PyErr_Occurred()) {
    PyErr_Clear(); /* a member of an enumeration, or a number of numpy's */
    PyObject *plain = PyNumber_Index(number);
    wide = plain ? PyLong_AsUnsignedLongLong(plain) : 0;
    Py_XDECREF(plain);
    if (PyErr_Occurred())
      return -1;
  }
  if (wide > UINT32_MAX) {
    PyErr_SetString(PyExc_OverflowError, "a number of a record does not fit into 32 bits");
    return -1;
  }
  *value = (uint32_t)wide;
  return 0;
}

static int to_i64(PyObject *number, int64_t *value) {
  *value = PyLong_AsLongLong(number);
  return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

static void put_span(char *at, uint32_t code, uint32_t ref, uint32_t n, int64_t queued, int64_t start, int64_t end) {
  put32(at + 8, ref);
  put32(at + 12, n);
  put64(at + 16, queued);
  put64(at + 24, start);
  put64(at + 32, end);
  put_head(at, SPAN_SIZE, SPAN_KIND, (uint16_t)code);
}

static int write_span(Appender *self, uint32_t code, uint32_t ref, uint32_t n, int64_t queued, int64_t start, int64_t end) {
  char *at = reserve(self, SPAN_SIZE);
  if (!at)
    return PyErr_Occurred() ? -1 : 0;
  put_span(at, code, ref, n, queued, start, end);
  return 0;
}

/* The arguments of a call by position, those given by keyword put where `names` has them; 0 when all are known. */
static int arguments(PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, const char *const *names,
                     Py_ssize_t count, Py_ssize_t needed, PyObject **found) {
  if (nargs > count) {
    PyErr_Format(PyExc_TypeError, "at most %zd arguments, not %zd", count, nargs);
    return -1;
  }
  for (Py_ssize_t k = 0; k < count; k++)
    found[k] = k < nargs ? args[k] : NULL;
  Py_ssize_t named = kwnames ? PyTuple_Size(kwnames) : 0;
  for (Py_ssize_t k = 0; k < named; k++) {
    PyObject *name = PyTuple_GetItem(kwnames, k);
    Py_ssize_t at = 0;
    while (at < count && PyUnicode_CompareWithASCIIString(name, names[at]))
      at++;
    if (at == count || found[at]) {
      PyErr_Format(PyExc_TypeError, "unexpected argument %R", name);
      return -1;
    }
    found[at] = args[nargs + k];
  }
  for (Py_ssize_t k = 0; k < needed; k++)
    if (!found[k]) {
      PyErr_Format(PyExc_TypeError, "argument '%s' is missing", names[k]);
      return -1;
    }
  return 0;
}

static PyObject *appender_span(Appender *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"code", "ref", "start_ns", "end_ns", "n", "queued_ns"};
  PyObject *given[6];
  uint32_t code, ref, n = 0;
  int64_t start, end, queued = 0;
  if (arguments(args, nargs, kwnames, names, 6, 4, given) || to_u32(given[0], &code) || to_u32(given[1], &ref) ||
      to_i64(given[2], &start) || to_i64(given[3], &end) || (given[4] && to_u32(given[4], &n)) ||
      (given[5] && to_i64(given[5], &queued)))
    return NULL;
  if (write_span(self, code, ref, n, queued ? queued : start, start, end))
    return NULL;
  Py_RETURN_NONE;
}

/* The k-th item of a list or tuple, borrowed. */
static PyObject *item(PyObject *row, Py_ssize_t k) {
  return PyList_Check(row) ? PyList_GetItem(row, k) : PyTuple_GetItem(row, k);
}

static PyObject *listed(PyObject *rows) {
  if (PyList_Check(rows) || PyTuple_Check(rows)) {
    Py_INCREF(rows);
    return rows;
  }
  return PySequence_List(rows);
}

static PyObject *appender_spans(Appender *self, PyObject *flat) {
  PyObject *numbers = listed(flat);
  if (!numbers)
    return NULL;
  Py_ssize_t count = PySequence_Size(numbers) / 8;
  char *at = count ? reserve(self, SPAN_SIZE * count) : NULL, *first = at;
  for (Py_ssize_t k = 0; at && k < count; k++, at += SPAN_SIZE) {
    uint32_t code, ref, n;
    int64_t queued, start, end;
    if (to_u32(item(numbers, 8 * k + 2), &code) || to_u32(item(numbers, 8 * k + 3), &ref) ||
        to_u32(item(numbers, 8 * k + 4), &n) || to_i64(item(numbers, 8 * k + 5), &queued) ||
        to_i64(item(numbers, 8 * k + 6), &start) || to_i64(item(numbers, 8 * k + 7), &end))
      break;
    put_span(at, code, ref, n, queued, start, end);
  }
  Py_DECREF(numbers);
  if (PyErr_Occurred()) {
    if (first)
      give_back(self, first, SPAN_SIZE * count);
    return NULL;
  }
  Py_RETURN_NONE;
}

/* Rows of `width` numbers, each into 32 bits, one after the other. */
static int put_rows(char *at, PyObject *rows, Py_ssize_t count, Py_ssize_t width) {
  for (Py_ssize_t k = 0; k < count; k++) {
    PyObject *row = item(rows, k);
    if (!row || !PyTuple_Check(row) || PyTuple_Size(row) != width) {
      PyErr_SetString(PyExc_TypeError, "a row of a record has another length");
      return -1;
    }
    for (Py_ssize_t j = 0; j < width; j++, at += 4) {
      uint32_t value;
      if (to_u32(PyTuple_GetItem(row, j), &value))
        return -1;
      put32(at, value);
    }
  }
  return 0;
}

static Py_ssize_t padded(Py_ssize_t size) { return (size + 7) & ~(Py_ssize_t)7; }

static PyObject *appender_step(Appender *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"flags",   "seq",         "entries",     "running",
                                      "waiting", "free_blocks", "schedule_ns", "padded"};
  PyObject *given[8];
  uint32_t flags, numbers[6] = {0}; /* seq, running, waiting, free blocks, padded, entries */
  int64_t schedule;
  if (arguments(args, nargs, kwnames, names, 8, 7, given) || to_u32(given[0], &flags) ||
      to_u32(given[1], &numbers[0]) || to_u32(given[3], &numbers[1]) || to_u32(given[4], &numbers[2]) ||
      to_u32(given[5], &numbers[3]) || to_i64(given[6], &schedule) || (given[7] && to_u32(given[7], &numbers[4])))
    return NULL;
  PyObject *entries = listed(given[2]);
  if (!entries)
    return NULL;
  Py_ssize_t count = PySequence_Size(entries), size = padded(STEP_SIZE + ENTRY_SIZE * count);
  char *at = reserve(self, size);
  if (at && !put_rows(at + STEP_SIZE, entries, count, 5)) {
    numbers[5] = (uint32_t)count;
    memcpy(at + 8, numbers, sizeof numbers);
    put64(at + 40, schedule);
    put_head(at, size, STEP_KIND, (uint16_t)flags);
  }
  Py_DECREF(entries);
  if (PyErr_Occurred()) {
    if (at)
      give_back(self, at, size);
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *appender_emit(Appender *self, PyObject *const *args, Py_ssize_t nargs) {
  uint32_t seq;
  int64_t at_ns;
  if (nargs != 3) {
    PyErr_SetString(PyExc_TypeError, "emit takes seq, at_ns and emissions");
    return NULL;
  }
  if (to_u32(args[0], &seq) || to_i64(args[1], &at_ns))
    return NULL;
  PyObject *emissions = listed(args[2]);
  if (!emissions)
    return NULL;
  Py_ssize_t count = PySequence_Size(emissions), size = padded(EMIT_SIZE + EMISSION_SIZE * count);
  char *at = reserve(self, size);
  if (at && !put_rows(at + EMIT_SIZE, emissions, count, 2)) {
    put32(at + 8, seq);
    put32(at + 12, (uint32_t)count);
    put64(at + 16, at_ns);
    put_head(at, size, EMIT_KIND, 0);
  }
  Py_DECREF(emissions);
  if (PyErr_Occurred()) {
    if (at)
      give_back(self, at, size);
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *appender_reserve(Appender *self, PyObject *wanted) {
  Py_ssize_t size = PyLong_AsSsize_t(wanted);
  if (size == -1 && PyErr_Occurred())
    return NULL;
  char *at = reserve(self, size);
  if (!at && PyErr_Occurred())
    return NULL;
  return PyLong_FromSsize_t(at ? at - self->base : 0);
}

static PyObject *appender_write(Appender *self, PyObject *args) {
  Py_ssize_t at, length;
  const char *bytes;
  if (!PyArg_ParseTuple(args, "ny#", &at, &bytes, &length))
    return NULL;
  if (at < 0 || !self->base || at + length > self->mapped) {
    PyErr_SetString(PyExc_ValueError, "beyond the file");
    return NULL;
  }
  memcpy(self->base + at, bytes, (size_t)length);
  Py_RETURN_NONE;
}

static PyObject *appender_map(Appender *self, PyObject *args) {
  int fd;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "in", &fd, &size))
    return NULL;
  void *base = self->base ? mremap(self->base, (size_t)self->mapped, (size_t)size, MREMAP_MAYMOVE)
                          : mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED)
    return PyErr_SetFromErrno(PyExc_OSError);
  self->base = base;
  self->size = self->mapped = size;
  Py_RETURN_NONE;
}

static PyObject *appender_address(Appender *self, PyObject *nothing) {
  (void)nothing;
  return PyLong_FromVoidPtr(self->base);
}

static void appender_dealloc(Appender *self) {
  if (self->base)
    munmap(self->base, (size_t)self->mapped);
  release(self);
}

#define METHOD(f) ((PyCFunction)(void (*)(void))(f))
static PyMethodDef appender_methods[] = {
    {"span", METHOD(appender_span), METH_FASTCALL | METH_KEYWORDS, "One activity."},
    {"spans", METHOD(appender_spans), METH_O, "Several activities, eight numbers each."},
    {"step", METHOD(appender_step), METH_FASTCALL | METH_KEYWORDS, "A scheduling decision."},
    {"emit", METHOD(appender_emit), METH_FASTCALL, "Who got new tokens from a step."},
    {"_reserve", METHOD(appender_reserve), METH_O, "The offset of so many fresh bytes, or 0."},
    {"_write", METHOD(appender_write), METH_VARARGS, "Bytes at an offset."},
    {"_map", METHOD(appender_map), METH_VARARGS, "Map the file, or more of it."},
    {"_address", METHOD(appender_address), METH_NOARGS, "Where the file is mapped."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef appender_members[] = {{"_pos", T_PYSSIZET, offsetof(Appender, pos), 0, "Where the next record goes."},
                                         {"_size", T_PYSSIZET, offsetof(Appender, size), 0, "Where there is no more room."},
                                         {NULL, 0, 0, 0, NULL}};
static PyType_Slot appender_slots[] = {{Py_tp_doc, "A mapped file that records are appended to."},
                                       {Py_tp_methods, appender_methods},
                                       {Py_tp_members, appender_members},
                                       {Py_tp_dealloc, appender_dealloc},
                                       {0, NULL}};
static PyType_Spec appender_spec = {"gapmeter_probe._native.Appender", sizeof(Appender), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, appender_slots};

/* ---- stamps: a few numbers that wrapped calls leave their times in */

typedef struct {
  PyObject_HEAD
  Py_ssize_t count;
  int64_t *at;
} Stamps;

static PyTypeObject *stamps_type;

static PyObject *stamps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  Py_ssize_t count;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "n", &count))
    return NULL;
  Stamps *self = allocate(type);
  if (!self)
    return NULL;
  self->at = PyMem_Calloc((size_t)(count > 0 ? count : 1), sizeof(int64_t));
  self->count = self->at ? count : 0;
  return self->at ? (PyObject *)self : PyErr_NoMemory();
}

static void stamps_dealloc(Stamps *self) {
  PyMem_Free(self->at);
  release(self);
}

static Py_ssize_t stamps_length(PyObject *self) { return ((Stamps *)self)->count; }

static PyObject *stamps_item(PyObject *self, Py_ssize_t k) {
  if (k < 0 || k >= ((Stamps *)self)->count) {
    PyErr_SetString(PyExc_IndexError, "no such stamp");
    return NULL;
  }
  return PyLong_FromLongLong(((Stamps *)self)->at[k]);
}

static int stamps_set(PyObject *self, Py_ssize_t k, PyObject *value) {
  if (k < 0 || k >= ((Stamps *)self)->count || !value) {
    PyErr_SetString(PyExc_IndexError, "no such stamp");
    return -1;
  }
  return to_i64(value, &((Stamps *)self)->at[k]);
}

static PyType_Slot stamps_slots[] = {{Py_tp_doc, "So many times, 0 at first."},
                                     {Py_tp_new, stamps_new},
                                     {Py_tp_dealloc, stamps_dealloc},
                                     {Py_sq_length, stamps_length},
                                     {Py_sq_item, stamps_item},
                                     {Py_sq_ass_item, stamps_set},
                                     {0, NULL}};
static PyType_Spec stamps_spec = {"gapmeter_probe._native.Stamps", sizeof(Stamps), 0, Py_TPFLAGS_DEFAULT, stamps_slots};

/* ---- calls */

enum { AFTER, BEFORE, AROUND, NOTE, ARRIVAL, MARK, TAKEN, SENT, EXECUTE, SAMPLE, RUN, FORWARDING, SAMPLED, PADDING };

typedef struct {
  HOLDS
  PyObject *original, *handle, *fail, *name, *of, *attributes;
  vectorcallfunc vectorcall;
  int64_t *stamps; /* NOTE, ARRIVAL: of the Stamps that is `of` */
  Py_ssize_t argument; /* NOTE: whose identity is noted, too; none below 0 */
  uint32_t code;
  int kind, coroutine;
} Wrapped;

static PyTypeObject *wrapped_type;

/* What of ours failed is told to `fail`, and goes no further; what is no Exception does (-1). */
static int settle(Wrapped *self, PyObject *told) {
  if (told) {
    Py_DECREF(told);
    return 0;
  }
  if (!PyErr_ExceptionMatches(PyExc_Exception))
    return -1;
  Raised raised = put_aside();
  PyErr_NormalizeException(&raised.type, &raised.value, &raised.trace);
  PyObject *answer = PyObject_CallFunctionObjArgs(self->fail, raised.value, NULL);
  forget(raised);
  if (!answer)
    return -1;
  Py_DECREF(answer);
  return 0;
}

static int handle_after(Wrapped *self, int64_t start, int64_t end, PyObject *result, PyObject *const *args, Py_ssize_t nargs) {
  PyObject *given[4] = {PyLong_FromLongLong(start), PyLong_FromLongLong(end), result, PyTuple_New(nargs)}, *told = NULL;
  if (given[0] && given[1] && given[3]) {
    for (Py_ssize_t k = 0; k < nargs; k++) {
      Py_INCREF(args[k]);
      PyTuple_SetItem(given[3], k, args[k]);
    }
    told = PyObject_Vectorcall(self->handle, given, 4, NULL);
  }
  Py_XDECREF(given[0]);
  Py_XDECREF(given[1]);
  Py_XDECREF(given[3]);
  return settle(self, told);
}

/* After the call, also one that raised, whose exception stays. */
static int handle_end(Wrapped *self, PyObject *end) {
  Raised raised = put_aside();
  int left = settle(self, PyObject_CallFunctionObjArgs(end, NULL));
  if (left)
    forget(raised);
  else
    raise_again(raised);
  return left;
}

/* Records a span once the future that a call gave has its result. */
typedef struct {
  PyObject_HEAD
  PyObject *writer;
  uint32_t code, seq, n;
  int64_t start;
} Arrival;

static PyTypeObject *arrival_type;

static PyObject *arrival_call(PyObject *object, PyObject *args, PyObject *kwargs) {
  Arrival *self = (Arrival *)object;
  (void)args;
  (void)kwargs;
  if (write_span((Appender *)self->writer, self->code, self->seq, self->n, self->start, self->start, now_ns()))
    return NULL;
  Py_RETURN_NONE;
}

static void arrival_dealloc(PyObject *object) {
  Py_XDECREF(((Arrival *)object)->writer);
  release(object);
}

static PyType_Slot arrival_slots[] = {{Py_tp_call, arrival_call}, {Py_tp_dealloc, arrival_dealloc}, {0, NULL}};
static PyType_Spec arrival_spec = {"gapmeter_probe._native.Arrival", sizeof(Arrival), 0, Py_TPFLAGS_DEFAULT, arrival_slots};

/* An attribute, or NULL without an exception when there is none. */
static PyObject *attribute(PyObject *object, PyObject *name) {
  PyObject *found = PyObject_GetAttr(object, name);
  if (!found && PyErr_ExceptionMatches(PyExc_AttributeError))
    PyErr_Clear();
  return found;
}

/* A record of this process, once there is a file: borrowed from the probe, which `handle` is. */
static PyObject *writer_of(Wrapped *self) {
  PyObject *writer = PyObject_GetAttr(self->handle, names[N_WRITER]);
  if (writer && (writer == Py_None || !PyObject_TypeCheck(writer, appender_type))) {
    Py_DECREF(writer);
    return NULL;
  }
  return writer;
}

/* The step is that of the second argument, where `name` says how it is called there, else the last one so called. */
static int record_arrival(Wrapped *self, int64_t start, int64_t end, PyObject *result, PyObject *const *args, Py_ssize_t nargs) {
  PyObject *writer = writer_of(self), *add = NULL, *told = NULL;
  int64_t lasted = end - start;
  int left = -1;
  if (!writer)
    return PyErr_Occurred() ? -1 : 0;
  if (self->name != Py_None) {
    PyObject *seq = nargs > 1 ? attribute(args[1], self->name) : NULL;
    int64_t step = 0;
    int failed = seq ? to_i64(seq, &step) : PyErr_Occurred() != NULL;
    Py_XDECREF(seq);
    self->stamps[0] = failed ? 0 : step;
    if (failed)
      goto over;
  }
  left = 0;
  if (!self->stamps[0])
    goto over;
  add = attribute(result, names[N_DONE_CALLBACK]);
  if (!add) {
    left = PyErr_Occurred() ? -1
                            : write_span((Appender *)writer, self->code, (uint32_t)self->stamps[0], 0, start, start, end);
    goto over;
  }
  Arrival *arrival = allocate(arrival_type);
  if (arrival) {
    arrival->writer = own(writer);
    arrival->code = self->code;
    arrival->seq = (uint32_t)self->stamps[0];
    arrival->start = start;
    arrival->n = lasted > UINT32_MAX ? UINT32_MAX : (uint32_t)lasted;
    told = PyObject_CallFunctionObjArgs(add, (PyObject *)arrival, NULL);
    Py_DECREF(arrival);
  }
  left = told ? 0 : -1;
over:
  Py_XDECREF(told);
  Py_XDECREF(add);
  Py_DECREF(writer);
  return left;
}

/* `handle` is a dict: under the first argument's attribute `name` the time is kept. */
static int keep_mark(Wrapped *self, PyObject *const *args, Py_ssize_t nargs) {
  PyObject *key = nargs ? PyObject_GetAttr(args[0], self->name) : NULL, *at = key ? PyLong_FromLongLong(now_ns()) : NULL;
  int left = at ? PyDict_SetItem(self->handle, key, at) : -1;
  Py_XDECREF(key);
  Py_XDECREF(at);
  return left;
}

static int set_taken(PyObject *object, PyObject *name) {
  PyObject *at = PyLong_FromLongLong(now_ns());
  int left = at ? PyObject_SetAttr(object, name, at) : -1;
  Py_XDECREF(at);
  return left;
}

/* A coroutine that is waited for, and what we do when it is done. */
typedef struct {
  HOLDS
  PyObject *coroutine, *of, *about; /* the wrapped function; its first argument (TAKEN), or what its handler said (SENT) */
  int64_t start;
} Awaited;

static PyTypeObject *awaited_type;

/* Ours, after the awaited call has given its result. SENT: `about` is (writer, rows of code, ref, n and queued). */
static int awaited_done(Awaited *self) {
  Wrapped *wrapped = (Wrapped *)self->of;
  int64_t end = now_ns();
  int left = 0;
  if (!self->about)
    return 0;
  if (wrapped->kind == TAKEN)
    left = set_taken(self->about, wrapped->name);
  else {
    PyObject *writer = PyTuple_GetItem(self->about, 0), *rows = PyTuple_GetItem(self->about, 1);
    Py_ssize_t count = PyObject_TypeCheck(writer, appender_type) && PyTuple_Check(rows) ? PyTuple_Size(rows) : -1;
    for (Py_ssize_t k = 0; !left && k < count; k++) {
      PyObject *row = PyTuple_GetItem(rows, k);
      uint32_t code, ref, n;
      int64_t queued;
      left = !PyTuple_Check(row) || PyTuple_Size(row) != 4 || to_u32(PyTuple_GetItem(row, 0), &code) ||
                     to_u32(PyTuple_GetItem(row, 1), &ref) || to_u32(PyTuple_GetItem(row, 2), &n) ||
                     to_i64(PyTuple_GetItem(row, 3), &queued)
                 ? -1
                 : write_span((Appender *)writer, code, ref, n, queued ? queued : self->start, self->start, end);
    }
    if (!PyErr_Occurred() && (left || count < 0)) {
      PyErr_SetString(PyExc_TypeError, "what was sent is told in another shape");
      left = -1;
    }
  }
  Py_CLEAR(self->about);
  return left ? settle(wrapped, NULL) : 0;
}

static PySendResult awaited_send(PyObject *object, PyObject *value, PyObject **result) {
  Awaited *self = (Awaited *)object;
  PySendResult state = PyIter_Send(self->coroutine, value, result);
  if (state == PYGEN_RETURN && awaited_done(self)) {
    Py_CLEAR(*result);
    return PYGEN_ERROR;
  }
  return state;
}

/* What a caller of next() or .send() sees: a value, or StopIteration with the result. */
static PyObject *awaited_given(PyObject *object, PyObject *value) {
  PyObject *result = NULL;
  PySendResult state = awaited_send(object, value, &result);
  if (state == PYGEN_RETURN) {
    PyObject *stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, result, NULL);
    Py_DECREF(result);
    if (stop) {
      PyErr_SetObject(PyExc_StopIteration, stop);
      Py_DECREF(stop);
    }
    return NULL;
  }
  return result;
}

static PyObject *awaited_next(PyObject *object) { return awaited_given(object, Py_None); }

static PyObject *awaited_throw(PyObject *object, PyObject *args) {
  Awaited *self = (Awaited *)object;
  PyObject *method = PyObject_GetAttrString(self->coroutine, "throw");
  PyObject *result = method ? PyObject_CallObject(method, args) : NULL;
  Py_XDECREF(method);
  if (!result && PyErr_ExceptionMatches(PyExc_StopIteration)) { /* it caught what was thrown, and is done */
    Raised raised = put_aside();
    if (awaited_done(self))
      forget(raised);
    else
      raise_again(raised);
  }
  return result;
}

static PyObject *awaited_close(PyObject *object, PyObject *nothing) {
  (void)nothing;
  return PyObject_CallMethod(((Awaited *)object)->coroutine, "close", NULL);
}

static PyMethodDef awaited_methods[] = {{"send", awaited_given, METH_O, NULL},
                                        {"throw", awaited_throw, METH_VARARGS, NULL},
                                        {"close", awaited_close, METH_NOARGS, NULL},
                                        {NULL, NULL, 0, NULL}};
static PyType_Slot awaited_slots[] = {{Py_tp_methods, awaited_methods}, {Py_am_await, own},
                                      {Py_am_send, awaited_send},       {Py_tp_iter, own},
                                      {Py_tp_iternext, awaited_next},   {Py_tp_traverse, holder_traverse},
                                      {Py_tp_clear, holder_clear},      {Py_tp_dealloc, holder_dealloc},
                                      {0, NULL}};
static PyType_Spec awaited_spec = {"gapmeter_probe._native.Awaited", sizeof(Awaited), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, awaited_slots};

/* SENT: `handle(*args)` says what will be recorded, or None; TAKEN: the first argument is told when it was. */
static PyObject *await_call(Wrapped *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
  Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  PyObject *about = NULL;
  if (self->kind == SENT) {
    about = PyObject_Vectorcall(self->handle, args, (size_t)nargs, NULL);
    if (!about && settle(self, NULL))
      return NULL;
    if (about && (!PyTuple_Check(about) || PyTuple_Size(about) != 2))
      Py_CLEAR(about);
  } else if (nargs) {
    about = own(args[0]);
  }
  PyObject *coroutine = PyObject_Vectorcall(self->original, args, nargsf, kwnames);
  if (!coroutine || !about) {
    Py_XDECREF(about);
    return coroutine;
  }
  Awaited *awaited = holder(awaited_type, 3);
  if (!awaited) {
    Py_DECREF(coroutine);
    Py_DECREF(about);
    return NULL;
  }
  awaited->of = own((PyObject *)self);
  awaited->coroutine = coroutine;
  awaited->about = about;
  awaited->start = now_ns();
  return (PyObject *)awaited;
}

/* ---- vLLM's worker in the engine's own process, on the host's clock: what WorkerProbe does in Python elsewhere */

enum { WORKER_SPAN = 110, INPUT_PREP_SPAN = 111, FORWARD_SPAN = 112, SAMPLING_SPAN = 113 };

typedef struct {
  HOLDS
  PyObject *writer;        /* None: all is done in Python */
  PyObject *padded, *mode; /* the batch's size with the bits of how it ran; the mode whose bits are known */
  int64_t seq, last_seq, prep, forward; /* of the remote call in progress; of the latest step */
  uint32_t padding, bits;
} Worker;

static PyTypeObject *worker_type;

static int worker_span(Worker *self, uint32_t code, int64_t start, int64_t end, uint32_t n) {
  return write_span((Appender *)self->writer, code, (uint32_t)self->seq, n, start, start, end);
}

/* The result of V1's padding is (mode, batch, ...). */
static int keep_padding(Worker *self, PyObject *result) {
  if (!PyTuple_Check(result) || PyTuple_Size(result) < 2) {
    PyErr_SetString(PyExc_TypeError, "the padding of a batch is told in another shape");
    return -1;
  }
  PyObject *mode = PyTuple_GetItem(result, 0), *batch = PyTuple_GetItem(result, 1);
  PyObject *tokens = PyObject_GetAttr(batch, names[N_NUM_TOKENS]);
  uint32_t count;
  int left = tokens ? to_u32(tokens, &count) : -1;
  Py_XDECREF(tokens);
  if (!left && mode != self->mode) {
    PyObject *whole = PyObject_CallFunctionObjArgs(self->padded, mode, batch, NULL);
    uint32_t value = 0;
    left = whole ? to_u32(whole, &value) : -1;
    Py_XDECREF(whole);
    if (!left) {
      Py_XDECREF(self->mode);
      self->mode = own(mode);
      self->bits = value - count;
    }
  }
  if (!left)
    self->padding = count + self->bits;
  return left;
}

/* `name` of the wrapped function is the same function as it is wrapped in Python. */
static PyObject *worker_call(Wrapped *wrapped, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
  Worker *self = (Worker *)wrapped->handle;
  PyObject *result, *seq;
  int64_t start, step;
  int left = 0;
  if (!PyObject_TypeCheck(self->writer, appender_type))
    return PyObject_Vectorcall(wrapped->name, args, nargsf, kwnames);
  switch (wrapped->kind) {
  case EXECUTE:
    seq = PyVectorcall_NARGS(nargsf) > 1 ? attribute(args[1], names[N_SEQ]) : NULL;
    step = 0;
    if ((PyErr_Occurred() || (seq && to_i64(seq, &step))) && settle(wrapped, NULL)) {
      Py_XDECREF(seq);
      return NULL;
    }
    Py_XDECREF(seq);
    if (step)
      self->last_seq = step;
    break;
  case SAMPLE:
    step = self->last_seq;
    break;
  default:
    step = self->seq;
  }
  if (!step)
    return PyObject_Vectorcall(wrapped->original, args, nargsf, kwnames);
  start = now_ns();
  if (wrapped->kind == EXECUTE || wrapped->kind == SAMPLE)
    self->seq = step;
  else if (wrapped->kind == RUN) {
    self->forward = self->padding = 0;
    self->prep = start;
  } else if (wrapped->kind == FORWARDING && !self->forward)
    self->forward = start;
  result = PyObject_Vectorcall(wrapped->original, args, nargsf, kwnames);
  Raised raised = put_aside();
  if (wrapped->kind == EXECUTE || wrapped->kind == SAMPLE) {
    left = worker_span(self, WORKER_SPAN, start, now_ns(), wrapped->kind == SAMPLE);
    self->seq = 0;
  } else if (wrapped->kind == RUN && self->forward) {
    int64_t end = now_ns();
    left = worker_span(self, INPUT_PREP_SPAN, self->prep, self->forward, self->padding) ||
                   worker_span(self, FORWARD_SPAN, self->forward, end, 0)
               ? -1
               : 0;
  } else if (wrapped->kind == SAMPLED && result)
    left = worker_span(self, SAMPLING_SPAN, start, now_ns(), 0);
  else if (wrapped->kind == PADDING && result)
    left = keep_padding(self, result);
  if (left && settle(wrapped, NULL)) {
    Py_CLEAR(result);
    forget(raised);
  } else
    raise_again(raised);
  return result;
}

static PyObject *worker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *padded;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "O", &padded))
    return NULL;
  Worker *self = holder(type, 3);
  if (!self)
    return NULL;
  self->padded = own(padded);
  self->writer = own(Py_None);
  return (PyObject *)self;
}

static PyMemberDef worker_members[] = {{"writer", T_OBJECT_EX, offsetof(Worker, writer), 0, NULL},
                                       {NULL, 0, 0, 0, NULL}};
static PyType_Slot worker_slots[] = {{Py_tp_new, worker_new},           {Py_tp_members, worker_members},
                                     {Py_tp_traverse, holder_traverse}, {Py_tp_dealloc, holder_dealloc},
                                     {0, NULL}};
static PyType_Spec worker_spec = {"gapmeter_probe._native.Worker", sizeof(Worker), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, worker_slots};

static PyObject *wrapped_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
  Wrapped *self = (Wrapped *)callable;
  Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  PyObject *result, *end = NULL;
  int64_t start;
  if (self->kind >= EXECUTE)
    return worker_call(self, args, nargsf, kwnames);
  switch (self->kind) {
  case NOTE:
    start = now_ns();
    result = PyObject_Vectorcall(self->original, args, nargsf, kwnames);
    if (result) {
      self->stamps[0] = start;
      self->stamps[1] = now_ns();
      if (self->argument >= 0)
        self->stamps[2] = self->argument < nargs ? (int64_t)(intptr_t)args[self->argument] : 0;
    }
    return result;
  case ARRIVAL:
    start = now_ns();
    result = PyObject_Vectorcall(self->original, args, nargsf, kwnames);
    if (result && record_arrival(self, start, now_ns(), result, args, nargs) && settle(self, NULL)) {
      Py_DECREF(result);
      return NULL;
    }
    return result;
  case MARK:
  case TAKEN:
  case SENT:
    if (self->coroutine)
      return await_call(self, args, nargsf, kwnames);
    result = PyObject_Vectorcall(self->original, args, nargsf, kwnames);
    if (result && (self->kind == MARK ? keep_mark(self, args, nargs)
                                      : result != Py_None && nargs ? set_taken(args[0], self->name) : 0) &&
        settle(self, NULL)) {
      Py_DECREF(result);
      return NULL;
    }
    return result;
  case AFTER:
    start = now_ns();
    result = PyObject_Vectorcall(self->original, args, nargsf, kwnames);
    if (result && handle_after(self, start, now_ns(), result, args, nargs)) {
      Py_DECREF(result);
      return NULL;
    }
    return result;
  case BEFORE:
    if (settle(self, PyObject_Vectorcall(self->handle, args, (size_t)nargs, NULL)))
      return NULL;
    return PyObject_Vectorcall(self->original, args, nargsf, kwnames);
  default:
    end = PyObject_Vectorcall(self->handle, args, (size_t)nargs, NULL);
    if (end == Py_None) {
      Py_DECREF(end);
      end = NULL;
    } else if (!end && settle(self, NULL))
      return NULL;
    result = PyObject_Vectorcall(self->original, args, nargsf, kwnames);
    if (end) {
      if (handle_end(self, end)) {
        Py_XDECREF(result);
        result = NULL;
      }
      Py_DECREF(end);
    }
    return result;
  }
}

/* wrap(kind, original, handle, fail, name=None, code=0, stamps=None, first=0, argument=-1, coroutine=False) */
static PyObject *make_wrapped(PyObject *module, PyObject *args) {
  PyObject *original, *handle, *fail, *name = Py_None, *stamps = Py_None;
  unsigned int code = 0;
  Py_ssize_t first = 0, argument = -1;
  int kind, coroutine = 0;
  (void)module;
  if (!PyArg_ParseTuple(args, "iOOO|OIOnnp", &kind, &original, &handle, &fail, &name, &code, &stamps, &first, &argument,
                        &coroutine))
    return NULL;
  if (kind >= EXECUTE && !PyObject_TypeCheck(handle, worker_type)) {
    PyErr_SetString(PyExc_TypeError, "a worker's call needs a Worker");
    return NULL;
  }
  int needed = kind == NOTE ? (argument < 0 ? 2 : 3) : kind == ARRIVAL ? 1 : 0;
  if (needed && (!PyObject_TypeCheck(stamps, stamps_type) || first < 0 || first + needed > ((Stamps *)stamps)->count)) {
    PyErr_SetString(PyExc_IndexError, "no such stamp");
    return NULL;
  }
  Wrapped *self = holder(wrapped_type, 6);
  if (!self)
    return NULL;
  self->vectorcall = wrapped_call;
  self->kind = kind;
  self->code = code;
  self->argument = argument;
  self->coroutine = coroutine;
  self->stamps = needed ? ((Stamps *)stamps)->at + first : NULL;
  self->original = own(original);
  self->handle = own(handle);
  self->fail = own(fail);
  self->name = own(name);
  self->of = own(stamps);
  return (PyObject *)self;
}

static PyObject *wrapped_get(PyObject *self, PyObject *instance, PyObject *owner) {
  (void)owner;
  if (!instance || instance == Py_None)
    return own(self);
  return PyObject_CallFunctionObjArgs(method_type, self, instance, NULL);
}

static int wrapped_clear(PyObject *object) {
  Py_CLEAR(((Wrapped *)object)->attributes);
  return 0;
}

static PyMemberDef wrapped_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Wrapped, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Wrapped, attributes), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyGetSetDef wrapped_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot wrapped_slots[] = {{Py_tp_doc, "A function, and what we do around it."},
                                      {Py_tp_call, PyVectorcall_Call},
                                      {Py_tp_descr_get, wrapped_get},
                                      {Py_tp_members, wrapped_members},
                                      {Py_tp_getset, wrapped_getset},
                                      {Py_tp_traverse, holder_traverse},
                                      {Py_tp_clear, wrapped_clear},
                                      {Py_tp_dealloc, holder_dealloc},
                                      {0, NULL}};
static PyType_Spec wrapped_spec = {
    "gapmeter_probe._native.Wrapped", sizeof(Wrapped), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, wrapped_slots};

/* ---- vLLM's engine loop: what Steps in vllm/steps.py does, at every step */

enum { SCHEDULE = 101, LOOP = 100, UPDATE = 104, OUTPUT_PUT = 105, OUTPUT_SEND = 106 };
enum { AHEAD = 1, EMPTY = 2, PREEMPTED = 8 };
enum { STEP_SLOT = 2, PUT_SLOT = 4, ENCODE_SLOT = 6, SLOTS = 10 };
enum { MOST_SPANS = 32, MOST_LOOPED = 16, MOST_LEAVING = 256 };

typedef struct {
  uint32_t code, ref;
  int64_t start, end;
} Buffered;

typedef struct {
  HOLDS
  PyObject *writer, *scheduler, *blocks; /* None until the file is open */
  PyObject *requests, *departed, *evicted, *evictions, *prompt_entry, *stamps;
  int64_t seq, updated, looped_ns, woken_ns;
  int putting, spans, looped;
  Buffered span[MOST_SPANS];
  uint32_t loop_steps[MOST_LOOPED];
  struct {
    int64_t identity, ready;
    uint32_t seq;
  } leaving[MOST_LEAVING];
  unsigned left; /* how many have left so far: the next place in `leaving` */
  uint32_t *numbers;
  Py_ssize_t room;
} Steps;

static PyTypeObject *steps_type, *deque_type;
static lenfunc deque_length;

static int recording(Steps *self) { return self->writer && PyObject_TypeCheck(self->writer, appender_type); }

static int buffer_span(Steps *self, uint32_t code, uint32_t ref, int64_t start, int64_t end) {
  if (self->spans == MOST_SPANS) { /* steps without an end of an iteration, as where vLLM runs without its loop */
    for (int k = 0; k < self->spans; k++)
      if (write_span((Appender *)self->writer, self->span[k].code, self->span[k].ref, 0, self->span[k].start,
                     self->span[k].start, self->span[k].end))
        return -1;
    self->spans = self->looped = 0;
  }
  self->span[self->spans++] = (Buffered){code, ref, start, end};
  return 0;
}

static void add_loop_step(Steps *self, uint32_t seq) {
  for (int k = 0; k < self->looped; k++)
    if (self->loop_steps[k] == seq)
      return;
  if (self->looped < MOST_LOOPED)
    self->loop_steps[self->looped++] = seq;
}

static int make_room(Steps *self, Py_ssize_t count) {
  if (count <= self->room)
    return 0;
  uint32_t *more = PyMem_Realloc(self->numbers, (size_t)count * 2 * sizeof *more);
  if (!more) {
    PyErr_NoMemory();
    return -1;
  }
  self->numbers = more;
  self->room = count * 2;
  return 0;
}

static Py_ssize_t attribute_length(PyObject *object, PyObject *name, int needed) {
  PyObject *held = needed ? PyObject_GetAttr(object, name) : attribute(object, name);
  if (!held)
    return PyErr_Occurred() ? -1 : 0;
  Py_ssize_t length = PyObject_TypeCheck(held, deque_type) ? deque_length(held) : PyObject_Size(held);
  Py_DECREF(held);
  return length;
}

static int attribute_u32(PyObject *object, PyObject *name, uint32_t *value) {
  PyObject *number = PyObject_GetAttr(object, name);
  int left = number ? to_u32(number, value) : -1;
  Py_XDECREF(number);
  return left;
}

/* What the Python side says of a request that computes prompt tokens, or those of before its eviction. */
static int slow_entry(Steps *self, uint32_t *entry, PyObject *engine_id, PyObject *tokens, PyObject *before, int is_new) {
  PyObject *row = PyObject_CallFunctionObjArgs(self->prompt_entry, engine_id, tokens, before,
                                               is_new ? Py_True : Py_False, NULL);
  int left = row && PyTuple_Check(row) && PyTuple_Size(row) == 5 ? 0 : -1;
  for (Py_ssize_t k = 0; !left && k < 5; k++)
    left = to_u32(PyTuple_GetItem(row, k), &entry[k]);
  if (left && !PyErr_Occurred())
    PyErr_SetString(PyExc_TypeError, "an entry has five numbers");
  Py_XDECREF(row);
  return left;
}

/* The entries of a step into `numbers`; how many, or -1. */
static Py_ssize_t put_entries(Steps *self, PyObject *output) {
  PyObject *tokens = PyObject_GetAttr(output, names[N_TOKENS]), *fresh = PyObject_GetAttr(output, names[N_NEW]);
  PyObject *running = PyObject_GetAttr(output, names[N_CACHED]);
  PyObject *ids = running ? PyObject_GetAttr(running, names[N_REQ_IDS]) : NULL;
  PyObject *computed = running ? PyObject_GetAttr(running, names[N_COMPUTED]) : NULL;
  Py_ssize_t count = -1, at = 0;
  if (!tokens || !fresh || !ids || !computed)
    goto over;
  if (!PyDict_Check(tokens) || !PyList_Check(fresh) || !PyList_Check(ids) || !PyList_Check(computed)) {
    PyErr_SetString(PyExc_TypeError, "the scheduler's output has another shape");
    goto over;
  }
  Py_ssize_t evictions = PyList_Size(self->evictions), added = PyList_Size(fresh), kept = PyList_Size(ids);
  if (make_room(self, 5 * (evictions + added + kept)))
    goto over;
  for (Py_ssize_t k = 0; k < evictions; k++, at++) {
    uint32_t *entry = self->numbers + 5 * at;
    memset(entry, 0, 5 * sizeof *entry);
    entry[4] = PREEMPTED;
    if (to_u32(PyList_GetItem(self->evictions, k), entry))
      goto over;
  }
  if (evictions && PyList_SetSlice(self->evictions, 0, evictions, NULL))
    goto over;
  for (Py_ssize_t k = 0; k < added; k++, at++) {
    PyObject *request = PyList_GetItem(fresh, k), *id = PyObject_GetAttr(request, names[N_REQ_ID]);
    PyObject *before = id ? PyObject_GetAttr(request, names[N_COMPUTED]) : NULL;
    PyObject *number = before ? PyDict_GetItemWithError(tokens, id) : NULL;
    int left = number ? slow_entry(self, self->numbers + 5 * at, id, number, before, 1) : -1;
    if (before && !number && !PyErr_Occurred())
      PyErr_SetObject(PyExc_KeyError, id);
    Py_XDECREF(id);
    Py_XDECREF(before);
    if (left)
      goto over;
  }
  Py_ssize_t some_evicted = PySet_Size(self->evicted);
  for (Py_ssize_t k = 0; k < kept; k++, at++) {
    uint32_t *entry = self->numbers + 5 * at;
    PyObject *id = PyList_GetItem(ids, k), *before = PyList_GetItem(computed, k);
    PyObject *known = before ? PyDict_GetItemWithError(self->requests, id) : NULL;
    PyObject *number = known ? PyDict_GetItemWithError(tokens, id) : NULL;
    uint32_t prompt, done;
    if (!number) {
      if (!PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, id);
      goto over;
    }
    if (to_u32(PyTuple_GetItem(known, 0), entry) || to_u32(PyTuple_GetItem(known, 1), &prompt) || to_u32(before, &done))
      goto over;
    if (done >= prompt && !(some_evicted && PySet_Contains(self->evicted, id))) {
      if (to_u32(number, entry + 1))
        goto over;
      entry[2] = done;
      entry[3] = entry[4] = 0;
    } else if (slow_entry(self, entry, id, number, before, 0))
      goto over;
  }
  count = at;
over:
  Py_XDECREF(tokens);
  Py_XDECREF(fresh);
  Py_XDECREF(running);
  Py_XDECREF(ids);
  Py_XDECREF(computed);
  return count;
}

/* handle(start_ns, end_ns, result, args) of each: */

static PyObject *steps_scheduled(Steps *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t start, end;
  if (nargs != 4 || to_i64(args[0], &start) || to_i64(args[1], &end))
    return NULL;
  if (!recording(self))
    Py_RETURN_NONE;
  PyObject *output = args[2], *number = PyLong_FromLongLong(++self->seq);
  if (!number || PyObject_SetAttr(output, names[N_SEQ], number)) {
    Py_XDECREF(number);
    return NULL;
  }
  Py_DECREF(number);
  uint32_t seq = (uint32_t)self->seq, head[6] = {seq}, total; /* seq, running, waiting, free blocks, padded, entries */
  add_loop_step(self, seq);
  Py_ssize_t running = attribute_length(self->scheduler, names[N_RUNNING], 1);
  Py_ssize_t waiting = attribute_length(self->scheduler, names[N_WAITING], 1);
  Py_ssize_t skipped = attribute_length(self->scheduler, names[N_SKIPPED], 0);
  if (running < 0 || waiting < 0 || skipped < 0 || attribute_u32(output, names[N_TOTAL], &total) ||
      attribute_u32(self->blocks, names[N_FREE], &head[3]))
    return NULL;
  Py_ssize_t count = put_entries(self, output);
  if (count < 0)
    return NULL;
  head[1] = (uint32_t)running;
  head[2] = (uint32_t)(waiting + skipped);
  head[5] = (uint32_t)count;
  Py_ssize_t size = padded(STEP_SIZE + ENTRY_SIZE * count);
  char *at = reserve((Appender *)self->writer, size);
  if (at) {
    memcpy(at + STEP_SIZE, self->numbers, (size_t)(ENTRY_SIZE * count));
    memcpy(at + 8, head, sizeof head);
    put64(at + 40, start);
    put_head(at, size, STEP_KIND, (uint16_t)((total ? 0 : EMPTY) | (self->seq - 1 > self->updated ? AHEAD : 0)));
  } else if (PyErr_Occurred())
    return NULL;
  if (buffer_span(self, SCHEDULE, seq, start, end))
    return NULL;
  Py_RETURN_NONE;
}

static int ref_of(Steps *self, PyObject *output, uint32_t *ref) {
  PyObject *id = PyObject_GetAttr(output, names[N_REQUEST_ID]);
  if (!id)
    return -1;
  PyObject *known = PyDict_GetItemWithError(self->requests, id);
  if (known)
    known = PyTuple_GetItem(known, 0);
  else if (!PyErr_Occurred() && !(known = PyDict_GetItemWithError(self->departed, id)) && !PyErr_Occurred())
    PyErr_SetObject(PyExc_KeyError, id);
  Py_DECREF(id);
  return known ? to_u32(known, ref) : -1;
}

static PyObject *steps_updated(Steps *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t start, end, seq = 0;
  if (nargs != 4 || to_i64(args[0], &start) || to_i64(args[1], &end))
    return NULL;
  PyObject *number = PyTuple_Size(args[3]) > 1 ? attribute(PyTuple_GetItem(args[3], 1), names[N_SEQ]) : NULL;
  if (number && to_i64(number, &seq)) {
    Py_DECREF(number);
    return NULL;
  }
  Py_XDECREF(number);
  if (PyErr_Occurred())
    return NULL;
  if (!recording(self) || !seq)
    Py_RETURN_NONE;
  PyObject *result = args[2], *outputs;
  if (!PyDict_Check(result)) {
    PyErr_SetString(PyExc_TypeError, "the scheduler's outputs have another shape");
    return NULL;
  }
  self->updated = seq;
  self->putting = PyDict_Size(result) > 0;
  add_loop_step(self, (uint32_t)seq);
  Py_ssize_t place = 0, count = 0;
  while (PyDict_Next(result, &place, NULL, &outputs)) {
    unsigned slot = self->left++ % MOST_LEAVING;
    self->leaving[slot].identity = (int64_t)(intptr_t)outputs;
    self->leaving[slot].ready = end;
    self->leaving[slot].seq = (uint32_t)seq;
    PyObject *of_requests = PyObject_GetAttr(outputs, names[N_OUTPUTS]);
    Py_ssize_t length = of_requests && PyList_Check(of_requests) ? PyList_Size(of_requests) : -1;
    if (length < 0 || make_room(self, 2 * (count + length))) {
      Py_XDECREF(of_requests);
      if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "the engine's outputs have another shape");
      return NULL;
    }
    for (Py_ssize_t k = 0; k < length; k++) {
      PyObject *output = PyList_GetItem(of_requests, k), *ids = PyObject_GetAttr(output, names[N_NEW_IDS]);
      Py_ssize_t new_tokens = ids && ids != Py_None ? PyObject_Size(ids) : ids ? 0 : -1;
      Py_XDECREF(ids);
      if (new_tokens < 0 || (new_tokens && ref_of(self, output, self->numbers + 2 * count))) {
        Py_DECREF(of_requests);
        return NULL;
      }
      if (new_tokens)
        self->numbers[2 * count++ + 1] = (uint32_t)new_tokens;
    }
    Py_DECREF(of_requests);
  }
  PyDict_Clear(self->departed);
  Py_ssize_t size = padded(EMIT_SIZE + EMISSION_SIZE * count);
  char *at = reserve((Appender *)self->writer, size);
  if (at) {
    memcpy(at + EMIT_SIZE, self->numbers, (size_t)(EMISSION_SIZE * count));
    put32(at + 8, (uint32_t)seq);
    put32(at + 12, (uint32_t)count);
    put64(at + 16, end);
    put_head(at, size, EMIT_KIND, 0);
  } else if (PyErr_Occurred())
    return NULL;
  if (buffer_span(self, UPDATE, (uint32_t)seq, start, end))
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *steps_looped(Steps *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t start, end, *stamps = ((Stamps *)self->stamps)->at;
  if (nargs != 4 || to_i64(args[0], &start) || to_i64(args[1], &end))
    return NULL;
  if (recording(self)) {
    int64_t begun = self->looped_ns ? self->looped_ns : self->woken_ns ? self->woken_ns : stamps[1];
    if (self->putting && buffer_span(self, OUTPUT_PUT, (uint32_t)self->updated, stamps[STEP_SLOT + 1], stamps[PUT_SLOT]))
      return NULL;
    int count = self->spans + self->looped;
    char *at = count ? reserve((Appender *)self->writer, SPAN_SIZE * count) : NULL;
    if (count && !at && PyErr_Occurred())
      return NULL;
    for (int k = 0; at && k < count; k++, at += SPAN_SIZE) {
      Buffered span = k < self->spans ? self->span[k] : (Buffered){LOOP, self->loop_steps[k - self->spans], begun, end};
      put_span(at, span.code, span.ref, 0, span.start, span.start, span.end);
    }
  }
  self->spans = self->looped = self->putting = 0;
  self->woken_ns = 0;
  Py_ssize_t running = attribute_length(self->scheduler, names[N_RUNNING], 1);
  int more = running > 0;
  if (running == 0) {
    PyObject *asked = PyObject_CallMethodObjArgs(PyTuple_GetItem(args[3], 0), names[N_HAS_WORK], NULL);
    more = asked ? PyObject_IsTrue(asked) : -1;
    Py_XDECREF(asked);
  }
  if (running < 0 || more < 0)
    return NULL;
  self->looped_ns = more ? end : 0;
  Py_RETURN_NONE;
}

static PyObject *steps_sent(Steps *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t end, *stamps = ((Stamps *)self->stamps)->at;
  if (nargs != 4 || to_i64(args[1], &end))
    return NULL;
  int64_t identity = stamps[ENCODE_SLOT + 2];
  for (unsigned back = 1; identity && back <= MOST_LEAVING && back <= self->left; back++) {
    unsigned slot = (self->left - back) % MOST_LEAVING;
    if (self->leaving[slot].identity != identity)
      continue;
    self->leaving[slot].identity = 0;
    if (recording(self) && write_span((Appender *)self->writer, OUTPUT_SEND, self->leaving[slot].seq, 0,
                                      self->leaving[slot].ready, stamps[ENCODE_SLOT], end))
      return NULL;
    break;
  }
  Py_RETURN_NONE;
}

static PyObject *steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *requests, *departed, *evicted, *evictions, *prompt_entry, *stamps;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "O!O!O!O!OO!", &PyDict_Type, &requests, &PyDict_Type, &departed, &PySet_Type, &evicted,
                        &PyList_Type, &evictions, &prompt_entry, stamps_type, &stamps))
    return NULL;
  if (((Stamps *)stamps)->count < SLOTS) {
    PyErr_SetString(PyExc_ValueError, "too few stamps");
    return NULL;
  }
  Steps *self = holder(type, 9);
  if (!self)
    return NULL;
  self->requests = own(requests);
  self->departed = own(departed);
  self->evicted = own(evicted);
  self->evictions = own(evictions);
  self->prompt_entry = own(prompt_entry);
  self->stamps = own(stamps);
  self->writer = own(Py_None);
  self->scheduler = own(Py_None);
  self->blocks = own(Py_None);
  return (PyObject *)self;
}

static void steps_dealloc(PyObject *object) {
  PyMem_Free(((Steps *)object)->numbers);
  holder_dealloc(object);
}

static PyMethodDef steps_methods[] = {{"scheduled", METHOD(steps_scheduled), METH_FASTCALL, NULL},
                                      {"updated", METHOD(steps_updated), METH_FASTCALL, NULL},
                                      {"looped", METHOD(steps_looped), METH_FASTCALL, NULL},
                                      {"sent", METHOD(steps_sent), METH_FASTCALL, NULL},
                                      {NULL, NULL, 0, NULL}};
static PyMemberDef steps_members[] = {{"writer", T_OBJECT_EX, offsetof(Steps, writer), 0, NULL},
                                      {"scheduler", T_OBJECT_EX, offsetof(Steps, scheduler), 0, NULL},
                                      {"blocks", T_OBJECT_EX, offsetof(Steps, blocks), 0, NULL},
                                      {"woken_ns", T_LONGLONG, offsetof(Steps, woken_ns), 0, NULL},
                                      {NULL, 0, 0, 0, NULL}};
static PyType_Slot steps_slots[] = {{Py_tp_new, steps_new},           {Py_tp_methods, steps_methods},
                                    {Py_tp_members, steps_members},   {Py_tp_traverse, holder_traverse},
                                    {Py_tp_dealloc, steps_dealloc},   {0, NULL}};
static PyType_Spec steps_spec = {"gapmeter_probe._native.Steps", sizeof(Steps), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, steps_slots};

/* ---- vLLM's API server: what Answers in vllm/answers.py does, at every message and every chunk */

enum { OUTPUT_RECEIVE = 5, DETOKENIZE = 6, EGRESS = 7, MOST_ARRIVED = 64 };

typedef struct {
  HOLDS
  PyObject *writer; /* None until the file is open */
  PyObject *generations, *marks, *carrying;
  int64_t arrived_ns;
  struct {
    int64_t identity, at;
  } arrived[MOST_ARRIVED];
  unsigned came; /* how many messages have come so far: the next place in `arrived` */
} Answers;

static PyTypeObject *answers_type;

static int attribute_i64(PyObject *object, PyObject *name, int64_t *value) {
  PyObject *number = PyObject_GetAttr(object, name);
  int left = number ? to_i64(number, value) : -1;
  Py_XDECREF(number);
  return left;
}

static int set_number(PyObject *object, PyObject *name, int64_t value) {
  PyObject *number = PyLong_FromLongLong(value);
  int left = number ? PyObject_SetAttr(object, name, number) : -1;
  Py_XDECREF(number);
  return left;
}

static PyObject *answers_decoded(Answers *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t start;
  if (nargs != 4 || to_i64(args[0], &start))
    return NULL;
  PyObject *outputs = attribute(args[2], names[N_OUTPUTS]);
  if (!outputs && PyErr_Occurred())
    return NULL;
  if (outputs && PyList_Check(outputs) && PyList_Size(outputs) && PyObject_TypeCheck(self->writer, appender_type)) {
    unsigned slot = self->came++ % MOST_ARRIVED;
    self->arrived[slot].identity = (int64_t)(intptr_t)PyList_GetItem(outputs, 0);
    self->arrived[slot].at = start;
  }
  Py_XDECREF(outputs);
  Py_RETURN_NONE;
}

/* One request's share of a batch; `before` is where it begins, and then where it ends. */
static int process_output(Answers *self, PyObject *output, int64_t arrived, int64_t start, int64_t *before) {
  PyObject *id = PyObject_GetAttr(output, names[N_REQUEST_ID]), *collector = NULL, *key = NULL, *ids = NULL;
  PyObject *generation = id ? PyDict_GetItemWithError(self->generations, id) : NULL;
  int left = -1;
  if (!generation) {
    Py_XDECREF(id);
    return PyErr_Occurred() ? -1 : 0;
  }
  Py_INCREF(generation);
  int64_t count, done = *before;
  uint32_t ref;
  ids = PyObject_GetAttr(output, names[N_NEW_IDS]);
  Py_ssize_t fresh = ids ? PyObject_Size(ids) : -1;
  if (fresh < 0 || attribute_i64(generation, names[N_RECEIVED], &count) ||
      set_number(generation, names[N_RECEIVED], count += fresh) || !(collector = PyObject_GetAttr(generation, names[N_COLLECTOR])))
    goto over;
  key = attribute(collector, names[N_REQUEST_ID]);
  if (!key && PyErr_Occurred())
    goto over;
  PyObject *mark = key ? PyDict_GetItemWithError(self->marks, key) : NULL;
  if (mark) {
    if (to_i64(mark, &done) || set_number(generation, names[N_PUT], count))
      goto over;
  } else if (PyErr_Occurred())
    goto over;
  if (done < *before)
    done = *before;
  if (fresh) {
    if (attribute_u32(generation, names[N_REF], &ref) ||
        write_span((Appender *)self->writer, OUTPUT_RECEIVE, ref, (uint32_t)count, arrived, arrived, start) ||
        write_span((Appender *)self->writer, DETOKENIZE, ref, (uint32_t)count, start, *before, done))
      goto over;
  }
  *before = done;
  PyObject *finish = PyObject_GetAttr(output, names[N_FINISH]);
  if (!finish)
    goto over;
  left = finish == Py_None ? 0
                           : PyObject_SetAttr(generation, names[N_FINISHED], Py_True) || PyDict_DelItem(self->generations, id)
                                 ? -1
                                 : 0;
  Py_DECREF(finish);
over:
  Py_XDECREF(id);
  Py_XDECREF(ids);
  Py_XDECREF(key);
  Py_XDECREF(collector);
  Py_DECREF(generation);
  return left;
}

static PyObject *answers_processed(Answers *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t start;
  if (nargs != 4 || to_i64(args[0], &start))
    return NULL;
  PyObject *given = PyTuple_GetItem(args[3], 1), *outputs = given ? listed(given) : NULL;
  if (!outputs)
    return NULL;
  Py_ssize_t count = PySequence_Size(outputs);
  int left = 0;
  if (count && PyObject_TypeCheck(self->writer, appender_type)) {
    int64_t identity = (int64_t)(intptr_t)item(outputs, 0), before = start;
    for (unsigned back = 1; back <= MOST_ARRIVED && back <= self->came; back++) {
      unsigned slot = (self->came - back) % MOST_ARRIVED;
      if (self->arrived[slot].identity == identity) {
        self->arrived[slot].identity = 0;
        self->arrived_ns = self->arrived[slot].at;
        break;
      }
    }
    for (Py_ssize_t k = 0; !left && k < count; k++)
      left = process_output(self, item(outputs, k), self->arrived_ns ? self->arrived_ns : start, start, &before);
  }
  Py_DECREF(outputs);
  PyDict_Clear(self->marks);
  if (left)
    return NULL;
  Py_RETURN_NONE;
}

/* The usual chunk: of a call with one generation that has begun to answer, and whose tokens were all taken. */
static PyObject *usual_chunk(Answers *self, PyObject *call) {
  PyObject *generations = PyObject_GetAttr(call, names[N_GENERATIONS]), *opened = NULL, *collector = NULL, *lying = NULL;
  PyObject *generation = NULL, *about = NULL;
  int64_t put, written, formatted = 0;
  uint32_t ref;
  if (!generations || !PyList_Check(generations) || PyList_Size(generations) != 1 ||
      !(opened = PyObject_GetAttr(call, names[N_OPENED])) || opened != Py_True)
    goto over;
  generation = PyList_GetItem(generations, 0);
  Py_INCREF(generation);
  if (!(collector = PyObject_GetAttr(generation, names[N_COLLECTOR])) ||
      !(lying = PyObject_GetAttr(collector, names[N_OUTPUT])) || lying != Py_None ||
      attribute_i64(generation, names[N_PUT], &put) || attribute_i64(generation, names[N_WRITTEN], &written) ||
      put <= written || attribute_u32(generation, names[N_REF], &ref) ||
      attribute_i64(collector, names[N_TAKEN], &formatted) || set_number(generation, names[N_WRITTEN], put))
    goto over;
  about = Py_BuildValue("(O((iILL)))", self->writer, EGRESS, ref, (long long)put, (long long)formatted);
over:
  Py_XDECREF(generations);
  Py_XDECREF(opened);
  Py_XDECREF(generation);
  Py_XDECREF(collector);
  Py_XDECREF(lying);
  return about;
}

static PyObject *answers_sending(Answers *self, PyObject *const *args, Py_ssize_t nargs) {
  if (nargs < 2)
    Py_RETURN_NONE;
  PyObject *call = attribute(args[0], names[N_CALL]);
  if (!call || call == Py_None || !PyDict_Check(args[1])) {
    Py_XDECREF(call);
    if (PyErr_Occurred())
      return NULL;
    Py_RETURN_NONE;
  }
  PyObject *body = PyDict_GetItemWithError(args[1], names[N_BODY]);
  int empty = !body || PyObject_Size(body) <= 0;
  PyObject *about = empty || PyErr_Occurred() ? NULL : usual_chunk(self, call);
  if (!empty && !about) {
    PyErr_Clear();
    about = PyObject_CallFunctionObjArgs(self->carrying, call, body, NULL);
  }
  Py_DECREF(call);
  if (about || PyErr_Occurred())
    return about;
  Py_RETURN_NONE;
}

static PyObject *answers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *generations, *marks, *carrying;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "O!O!O", &PyDict_Type, &generations, &PyDict_Type, &marks, &carrying))
    return NULL;
  Answers *self = holder(type, 4);
  if (!self)
    return NULL;
  self->generations = own(generations);
  self->marks = own(marks);
  self->carrying = own(carrying);
  self->writer = own(Py_None);
  return (PyObject *)self;
}

static PyMethodDef answers_methods[] = {{"decoded", METHOD(answers_decoded), METH_FASTCALL, NULL},
                                        {"processed", METHOD(answers_processed), METH_FASTCALL, NULL},
                                        {"sending", METHOD(answers_sending), METH_FASTCALL, NULL},
                                        {NULL, NULL, 0, NULL}};
static PyMemberDef answers_members[] = {{"writer", T_OBJECT_EX, offsetof(Answers, writer), 0, NULL},
                                        {NULL, 0, 0, 0, NULL}};
static PyType_Slot answers_slots[] = {{Py_tp_new, answers_new},         {Py_tp_methods, answers_methods},
                                      {Py_tp_members, answers_members}, {Py_tp_traverse, holder_traverse},
                                      {Py_tp_dealloc, holder_dealloc}, {0, NULL}};
static PyType_Spec answers_spec = {"gapmeter_probe._native.Answers", sizeof(Answers), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, answers_slots};

/* ---- the module */

static PyMethodDef functions[] = {
    {"wrap", make_wrapped, METH_VARARGS, "A function with our own code around it."},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, functions, NULL, NULL, NULL, NULL};

static PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec) {
  PyObject *type = PyType_FromSpec(spec);
  if (!type || PyModule_AddObject(module, name, type))
    return NULL;
  Py_INCREF(type);
  return (PyTypeObject *)type;
}

PyMODINIT_FUNC PyInit__native(void) {
  PyObject *module = PyModule_Create(&definition);
  PyObject *types = PyImport_ImportModule("types");
  method_type = types ? PyObject_GetAttrString(types, "MethodType") : NULL;
  Py_XDECREF(types);
  PyObject *collections = PyImport_ImportModule("collections");
  deque_type = collections ? (PyTypeObject *)PyObject_GetAttrString(collections, "deque") : NULL;
  Py_XDECREF(collections);
  deque_length = deque_type ? (lenfunc)PyType_GetSlot(deque_type, Py_sq_length) : NULL;
  if (!deque_length)
    return NULL;
  for (int k = 0; k < NAMES; k++)
    if (!(names[k] = PyUnicode_InternFromString(spelled[k])))
      return NULL;
  if (!module || !method_type ||
      !(arrival_type = (PyTypeObject *)PyType_FromSpec(&arrival_spec)) ||
      !(awaited_type = (PyTypeObject *)PyType_FromSpec(&awaited_spec)) || !(appender_type = add_type(module, "Appender", &appender_spec)) ||
      !(stamps_type = add_type(module, "Stamps", &stamps_spec)) ||
      !(worker_type = add_type(module, "Worker", &worker_spec)) ||
      !(steps_type = add_type(module, "Steps", &steps_spec)) ||
      !(answers_type = add_type(module, "Answers", &answers_spec)) ||
      !(wrapped_type = add_type(module, "Wrapped", &wrapped_spec)))
    return NULL;
  static const char *const kinds[] = {"AFTER", "BEFORE",  "AROUND", "NOTE", "ARRIVAL",    "MARK",    "TAKEN",
                                      "SENT",  "EXECUTE", "SAMPLE", "RUN",  "FORWARDING", "SAMPLED", "PADDING"};
  for (int kind = AFTER; kind <= PADDING; kind++)
    if (PyModule_AddIntConstant(module, kinds[kind], kind))
      return NULL;
  return module;
}
