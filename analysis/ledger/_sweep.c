/* Divides each event's time among the activities that overlap in it.

The same as `_sweep_in_python` of critical_path.py, which runs where this was not built. It gives the interpreter's lock
away. Limited API. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FEW = 64 };

typedef struct {
  int64_t time;
  int32_t cls, begins;
} Edge;

typedef struct {
  int64_t event, start, end, cls;
} Stretch;

/* The columns of the intervals, `rows` long, and what is asked: of each class whether it hides, or is hidden work. */
typedef struct {
  const int64_t *event, *start, *end, *cls;
  const char *over, *under;
  int64_t rows, events, classes;
} Given;

/* What is found, and the room that it takes to find it. */
typedef struct {
  Stretch *stretches;
  int64_t *hidden, *first, *placed, *active; /* by event; where each event's rows begin; rows in order; by class */
  Edge *edges;
  int64_t count, room, beneath; /* `beneath`: how many classes of hidden work are active */
} Found;

static int by_time(const void *one, const void *other) {
  int64_t a = ((const Edge *)one)->time, b = ((const Edge *)other)->time;
  return (a > b) - (a < b);
}

static void in_order(Edge *edges, int64_t count) {
  if (count > FEW) {
    qsort(edges, (size_t)count, sizeof *edges, by_time);
    return;
  }
  for (int64_t k = 1; k < count; k++) {
    Edge edge = edges[k];
    int64_t at = k;
    for (; at > 0 && edges[at - 1].time > edge.time; at--) edges[at] = edges[at - 1];
    edges[at] = edge;
  }
}

/* Whether there is room for one more. */
static int owned(Found *found, int64_t event, int64_t start, int64_t end, int64_t cls) {
  Stretch *last = found->count ? found->stretches + found->count - 1 : NULL;
  if (last && last->event == event && last->cls == cls && last->end == start) {
    last->end = end;
    return 1;
  }
  if (found->count == found->room) {
    Stretch *more = realloc(found->stretches, 2 * (size_t)found->room * sizeof *more);
    if (more == NULL) return 0;
    found->stretches = more;
    found->room *= 2;
  }
  found->stretches[found->count++] = (Stretch){event, start, end, cls};
  return 1;
}

/* One event's stretches. A class is active while more of its intervals have begun than ended. */
static int divide(const Given *given, Found *found, int64_t event) {
  int64_t count = 0, owner = given->classes;
  for (int64_t k = found->first[event]; k < found->first[event + 1]; k++) {
    int64_t row = found->placed[k];
    if (given->end[row] <= given->start[row]) continue;
    found->edges[count++] = (Edge){given->start[row], (int32_t)given->cls[row], 1};
    found->edges[count++] = (Edge){given->end[row], (int32_t)given->cls[row], 0};
  }
  in_order(found->edges, count);
  for (int64_t k = 0; k < count; k++) {
    Edge edge = found->edges[k];
    if (edge.begins) {
      if (found->active[edge.cls]++ == 0) found->beneath += given->under[edge.cls];
      if (edge.cls < owner) owner = edge.cls;
    } else if (--found->active[edge.cls] == 0) {
      found->beneath -= given->under[edge.cls];
      if (edge.cls == owner)
        while (owner < given->classes && found->active[owner] == 0) owner++;
    }
    if (k + 1 == count || owner == given->classes) continue;
    int64_t length = found->edges[k + 1].time - edge.time;
    if (length == 0) continue;
    if (given->over[owner] && found->beneath) found->hidden[event] += length;
    if (!owned(found, event, edge.time, edge.time + length, owner)) return 0;
  }
  return 1;
}

/* Every event's; the rows are brought into the events' order first. Whether the memory sufficed. */
static int divide_all(const Given *given, Found *found) {
  int64_t most = 0;
  found->room = given->rows + 1;
  found->stretches = malloc((size_t)found->room * sizeof *found->stretches);
  found->hidden = calloc((size_t)given->events + 1, sizeof *found->hidden);
  found->first = calloc((size_t)given->events + 2, sizeof *found->first);
  found->placed = malloc((size_t)(given->rows + 1) * sizeof *found->placed);
  found->active = calloc((size_t)given->classes + 1, sizeof *found->active);
  if (!found->stretches || !found->hidden || !found->first || !found->placed || !found->active) return 0;
  int64_t *next = found->first + 1;
  for (int64_t row = 0; row < given->rows; row++) next[given->event[row] + 1]++;
  for (int64_t event = 0; event < given->events; event++) {
    if (next[event + 1] > most) most = next[event + 1];
    next[event + 1] += next[event];
  }
  for (int64_t row = 0; row < given->rows; row++) found->placed[next[given->event[row]]++] = row;
  found->edges = malloc((size_t)(2 * most + 1) * sizeof *found->edges);
  if (found->edges == NULL) return 0;
  for (int64_t event = 0; event < given->events; event++)
    if (!divide(given, found, event)) return 0;
  return 1;
}

static int allowed(const Given *given) {
  for (int64_t row = 0; row < given->rows; row++) {
    if (given->event[row] < 0 || given->event[row] >= given->events) return 0;
    if (given->cls[row] < 0 || given->cls[row] >= given->classes) return 0;
  }
  return 1;
}

/* sweep(event, start, end, cls, events, over, under) is (stretches, hidden): columns of 64-bit integers, `over` and
   `under` a byte a class; rows as `Stretch` has them, and ns an event. */
static PyObject *sweep(PyObject *module, PyObject *arguments) {
  Py_buffer columns[4], kinds[2];
  Py_ssize_t events;
  PyObject *result = NULL;
  Found found = {0};
  (void)module;
  if (!PyArg_ParseTuple(arguments, "y*y*y*y*ny*y*", &columns[0], &columns[1], &columns[2], &columns[3], &events,
                        &kinds[0], &kinds[1]))
    return NULL;
  Given given = {columns[0].buf, columns[1].buf, columns[2].buf, columns[3].buf, kinds[0].buf, kinds[1].buf,
                 columns[0].len / (Py_ssize_t)sizeof(int64_t), events, kinds[0].len};
  int alike = kinds[1].len == kinds[0].len && events >= 0;
  for (int k = 1; k < 4; k++) alike = alike && columns[k].len == columns[0].len;
  if (!alike || !allowed(&given)) {
    PyErr_SetString(PyExc_ValueError, "no columns of one length, or an event or a class that is not there");
  } else {
    int whole;
    Py_BEGIN_ALLOW_THREADS
    whole = divide_all(&given, &found);
    Py_END_ALLOW_THREADS
    if (whole)
      result = Py_BuildValue("(y#y#)", (const char *)found.stretches,
                             (Py_ssize_t)(found.count * (int64_t)sizeof *found.stretches), (const char *)found.hidden,
                             (Py_ssize_t)(given.events * (int64_t)sizeof *found.hidden));
    else
      PyErr_NoMemory();
  }
  free(found.stretches);
  free(found.hidden);
  free(found.first);
  free(found.placed);
  free(found.active);
  free(found.edges);
  for (int k = 0; k < 4; k++) PyBuffer_Release(&columns[k]);
  for (int k = 0; k < 2; k++) PyBuffer_Release(&kinds[k]);
  return result;
}

static PyMethodDef methods[] = {
    {"sweep", sweep, METH_VARARGS, "Who owns which stretch of each event."}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sweep", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sweep(void) { return PyModule_Create(&module); }
