/* What the ledger does to many intervals: each in one pass, and without the interpreter's lock.

The same as `critical_path.py` and `shares.py` do with NumPy where this was not built. Columns come and go as bytes of
int64 (reasons: of int16), times are ns. Limited API. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static int64_t most(int64_t one, int64_t other) { return one > other ? one : other; }

/* ---- arguments and results */

static void release(Py_buffer *columns, int count) {
  for (int at = 0; at < count; at++) PyBuffer_Release(&columns[at]);
}

/* The first arguments as columns, of values of so many bytes each; as many arguments as are wanted must be given. */
static int taken(PyObject *const *arguments, Py_ssize_t given, Py_ssize_t wanted, const char *sizes,
                 Py_buffer *columns) {
  int count = (int)strlen(sizes);
  if (given != wanted) {
    PyErr_Format(PyExc_TypeError, "%zd arguments are wanted, not %zd", wanted, given);
    return 0;
  }
  for (int at = 0; at < count; at++) {
    if (PyObject_GetBuffer(arguments[at], &columns[at], PyBUF_SIMPLE) < 0) {
      release(columns, at);
      return 0;
    }
    columns[at].len /= sizes[at] - '0';
  }
  return 1;
}

static PyObject *failed(const char *why, Py_buffer *columns, int count) {
  release(columns, count);
  if (why == NULL) return PyErr_NoMemory();
  PyErr_SetString(PyExc_ValueError, why);
  return NULL;
}

/* ---- sweep */

typedef struct {
  int64_t start, end, cls;
} Row;

typedef struct {
  int64_t event, start, end, cls;
} Owned;

typedef struct {
  int64_t *until;   /* of each class, when it ends */
  uint64_t *active; /* a bit a class; some have ended already */
  size_t words;
  const uint8_t *marks; /* of each class */
  Owned *found, *next;
  int64_t hidden;
} Sweep;

enum { OVER = 1, UNDER = 2, FEW = 32 };

static size_t run_end(const Row *rows, size_t at, size_t count) {
  while (++at < count && rows[at - 1].start <= rows[at].start) {}
  return at < count ? at : count;
}

/* Merges what lies in order in pairs, again and again: rows come as a few lists that were in order. Returns which of
   the two has them at last. */
static Row *in_order(Row *rows, Row *spare, size_t count) {
  if (count <= FEW) {
    for (size_t at = 1; at < count; at++) {
      Row row = rows[at];
      size_t to = at;
      for (; to > 0 && rows[to - 1].start > row.start; to--) rows[to] = rows[to - 1];
      rows[to] = row;
    }
    return rows;
  }
  while (run_end(rows, 0, count) < count) {
    for (size_t at = 0, end; at < count; at = end) {
      size_t middle = run_end(rows, at, count), left = at, right = middle;
      end = run_end(rows, middle, count);
      while (left < middle && right < end) {
        int later = rows[left].start > rows[right].start;
        spare[at++] = rows[later ? right : left];
        right += (size_t)later;
        left += (size_t)!later;
      }
      memcpy(spare + at, rows + left, (middle - left) * sizeof *rows);
      memcpy(spare + at + (middle - left), rows + right, (end - right) * sizeof *rows);
    }
    Row *merged = spare;
    spare = rows;
    rows = merged;
  }
  return rows;
}

static void begin(Sweep *sweep, const Row *row) {
  uint64_t *word = &sweep->active[row->cls / 64], bit = (uint64_t)1 << row->cls % 64;
  int64_t *until = &sweep->until[row->cls];
  *until = *word & bit ? most(*until, row->end) : row->end;
  *word |= bit;
}

/* The active class of highest priority, -1 where there is none. */
static int64_t owner(Sweep *sweep, int64_t now) {
  for (size_t at = 0; at < sweep->words; at++)
    while (sweep->active[at]) {
      int64_t cls = (int64_t)at * 64 + __builtin_ctzll(sweep->active[at]);
      if (sweep->until[cls] > now) return cls;
      sweep->active[at] &= sweep->active[at] - 1;
    }
  return -1;
}

static void own(Sweep *sweep, int64_t event, int64_t start, int64_t end, int64_t cls) {
  Owned *last = sweep->next > sweep->found ? sweep->next - 1 : NULL;
  if (last != NULL && last->event == event && last->cls == cls && last->end == start) last->end = end;
  else *sweep->next++ = (Owned){event, start, end, cls};
}

/* One event, whose rows are in order of their starts. */
static void divide(Sweep *sweep, int64_t event, const Row *row, const Row *after) {
  int64_t now = INT64_MIN, beneath = INT64_MIN; /* until when a class of UNDER is active */
  sweep->hidden = 0;
  for (;;) {
    for (; row < after && row->start <= now; row++) {
      begin(sweep, row);
      if (sweep->marks[row->cls] & UNDER) beneath = most(beneath, row->end);
    }
    int64_t cls = owner(sweep, now);
    if (cls < 0 && row == after) return;
    int64_t end = row < after ? row->start : INT64_MAX;
    if (cls >= 0) {
      end = least(end, sweep->until[cls]);
      own(sweep, event, now, end, cls);
      if (sweep->marks[cls] & OVER) sweep->hidden += least(most(beneath, now), end) - now;
    }
    now = end;
  }
}

/* sweep(event, start, end, cls, marks, hidden): what each class owns, as columns of event, start, end and class; and
   into `hidden`, an element an event, the time that is hidden. `marks`: a byte a class. */
static PyObject *sweep(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
  Py_buffer in[6];
  (void)module;
  if (!taken(arguments, given, 6, "888818", in)) return NULL;
  const int64_t *event = in[0].buf, *start = in[1].buf, *end = in[2].buf, *cls = in[3].buf;
  size_t count = (size_t)in[0].len, classes = (size_t)in[4].len, events = (size_t)in[5].len, words = classes / 64 + 1;
  int64_t *hidden = in[5].buf;
  int fits = in[1].len == in[0].len && in[2].len == in[0].len && in[3].len == in[0].len && !in[5].readonly;
  for (size_t at = 0; fits && at < count; at++)
    fits = (uint64_t)event[at] < events && (uint64_t)cls[at] < classes;
  if (!fits) return failed("columns of other lengths, or an event or a class beyond the last", in, 6);
  size_t *place = calloc(events + 2, sizeof *place);
  Row *rows = malloc((count + 1) * sizeof *rows), *spare = malloc((count + 1) * sizeof *spare);
  Owned *found = malloc((2 * count + 1) * sizeof *found);
  Sweep state = {calloc(classes + 1, 8), calloc(words, 8), words, in[4].buf, found, found, 0};
  PyObject *result = NULL;
  if (place && rows && spare && found && state.until && state.active) {
    Py_BEGIN_ALLOW_THREADS;
    for (size_t at = 0; at < count; at++) place[event[at] + 2] += start[at] < end[at];
    for (size_t at = 0; at < events; at++) place[at + 2] += place[at + 1];
    for (size_t at = 0; at < count; at++)
      if (start[at] < end[at]) rows[place[event[at] + 1]++] = (Row){start[at], end[at], cls[at]};
    for (size_t at = 0; at < events; at++) {
      size_t length = place[at + 1] - place[at];
      Row *ordered = in_order(rows + place[at], spare + place[at], length);
      divide(&state, (int64_t)at, ordered, ordered + length);
      hidden[at] = state.hidden;
    }
    Py_END_ALLOW_THREADS;
    size_t many = (size_t)(state.next - found);
    result = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(many * sizeof *found));
    if (result != NULL) {
      int64_t *to = (int64_t *)(void *)PyByteArray_AsString(result);
      Py_BEGIN_ALLOW_THREADS;
      for (size_t at = 0; at < many; at++) {
        to[at] = found[at].event;
        to[at + many] = found[at].start;
        to[at + 2 * many] = found[at].end;
        to[at + 3 * many] = found[at].cls;
      }
      Py_END_ALLOW_THREADS;
    }
  }
  free(place);
  free(rows);
  free(spare);
  free(found);
  free(state.until);
  free(state.active);
  if (result == NULL) return failed(NULL, in, 6);
  release(in, 6);
  return result;
}

/* ---- the stretches that intervals meet */

/* The first of some values in order that is greater than a bound: mostly not far from `hint`. */
static size_t beyond(const int64_t *values, size_t count, int64_t bound, size_t hint) {
  size_t low = hint, high = hint; /* what lies before `low` is not greater, what lies from `high` on is */
  for (size_t step = 1; high < count && values[high] <= bound; step *= 2) {
    low = high + 1;
    high = high + step < count ? high + step : count;
  }
  for (size_t step = 1; low > 0 && values[low - 1] > bound; step *= 2) {
    high = low - 1;
    low = low > step ? low - step : 0;
  }
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (values[middle] <= bound) low = middle + 1;
    else high = middle;
  }
  return low;
}

typedef struct {
  const int64_t *start, *end;
  size_t count;
} Times;

/* How often intervals meet stretches, or with `between` what lies between these; and into `to`, if that is not NULL,
   columns of so `many` each: which interval, which stretch, from, to. */
static size_t meet(Times intervals, Times stretches, int between, int64_t *to, size_t many) {
  size_t found = 0, first = 0, after = 0;
  for (size_t row = 0; row < intervals.count; row++) {
    int64_t start = intervals.start[row], end = intervals.end[row];
    first = beyond(between ? stretches.start : stretches.end, stretches.count, start, first);
    after = beyond(between ? stretches.end : stretches.start, stretches.count, end - 1, after);
    for (size_t at = first; at < after + (between != 0); at++) {
      int64_t low = start, high = end;
      if (!between) {
        low = most(low, stretches.start[at]);
        high = least(high, stretches.end[at]);
      } else {
        if (at > 0) low = most(low, stretches.end[at - 1]);
        if (at < stretches.count) high = least(high, stretches.start[at]);
      }
      if (low >= high) continue;
      if (to != NULL) {
        to[found] = (int64_t)row;
        to[found + many] = (int64_t)at;
        to[found + 2 * many] = low;
        to[found + 3 * many] = high;
      }
      found++;
    }
  }
  return found;
}

/* meet(start, end, stretch_start, stretch_end, between) as columns. */
static PyObject *meetings(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
  Py_buffer in[4];
  (void)module;
  if (!taken(arguments, given, 5, "8888", in)) return NULL;
  int between = arguments[4] == Py_True;
  if (in[0].len != in[1].len || in[2].len != in[3].len) return failed("columns of other lengths", in, 4);
  Times intervals = {in[0].buf, in[1].buf, (size_t)in[0].len}, stretches = {in[2].buf, in[3].buf, (size_t)in[2].len};
  size_t many;
  Py_BEGIN_ALLOW_THREADS;
  many = meet(intervals, stretches, between, NULL, 0);
  Py_END_ALLOW_THREADS;
  PyObject *result = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(4 * many * sizeof(int64_t)));
  if (result == NULL) return failed(NULL, in, 4);
  int64_t *to = (int64_t *)(void *)PyByteArray_AsString(result);
  Py_BEGIN_ALLOW_THREADS;
  meet(intervals, stretches, between, to, many);
  Py_END_ALLOW_THREADS;
  release(in, 4);
  return result;
}

/* ---- what kept threads */

enum { KINDS = 3, BLOCK = 4 };

typedef struct {
  int64_t before[KINDS]; /* for how long each kind of reason had kept it when the first of BLOCK stretches begins, */
  int64_t over;          /* and how many intervals are under way in all from there on, less those before */
} Kept;

typedef struct {
  Times stretches;
  const int16_t *reason;
  const uint8_t *kind; /* of each reason */
  Kept *kept;
  int64_t *by_reason;
} Reasons;

/* What each kind had kept by a moment: `sign` times that is added to a row of `to`. The stretch behind the last one that
   had begun by then is found near `hint`, and returned. */
static size_t add_until(Reasons *of, int64_t moment, int64_t often, int sign, int64_t *to, size_t rows, size_t hint) {
  size_t after = beyond(of->stretches.start, of->stretches.count, moment, hint), last = after > 0 ? after - 1 : 0;
  Kept *kept = &of->kept[last / BLOCK];
  for (size_t kind = 0; kind < KINDS; kind++) to[kind * rows] += sign * kept->before[kind];
  kept->over -= sign * often;
  for (size_t at = last / BLOCK * BLOCK; at <= last; at++) {
    int64_t passed = sign * most(least(moment, of->stretches.end[at]) - of->stretches.start[at], 0);
    to[of->kind[of->reason[at]] * rows] += passed;
    of->by_reason[of->reason[at]] += often * passed;
  }
  return after;
}

/* kept(event, start, end, rows, counted, stretch_start, stretch_end, reason, kinds, by_reason, ns): for how long each
   kind of reason, of KINDS, kept the thread in some rows of intervals, into `ns`, a column a kind; and into `by_reason`
   each reason in all of them together, each as often as its event is counted. Both are zero beforehand. */
static PyObject *kept(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
  Py_buffer in[11];
  (void)module;
  if (!taken(arguments, given, 11, "88888882188", in)) return NULL;
  const int64_t *event = in[0].buf, *start = in[1].buf, *end = in[2].buf, *row = in[3].buf, *counted = in[4].buf;
  Times stretches = {in[5].buf, in[6].buf, (size_t)in[5].len};
  Reasons of = {stretches, in[7].buf, in[8].buf, NULL, in[9].buf};
  size_t rows = (size_t)in[3].len;
  int64_t *ns = in[10].buf;
  int fits = in[1].len == in[0].len && in[2].len == in[0].len && in[6].len == in[5].len && in[7].len == in[5].len &&
             in[9].len == in[8].len && in[10].len == KINDS * in[3].len && !in[9].readonly && !in[10].readonly;
  for (size_t at = 0; fits && at < rows; at++)
    fits = (uint64_t)row[at] < (uint64_t)in[0].len && (uint64_t)event[row[at]] < (uint64_t)in[4].len;
  for (Py_ssize_t at = 0; fits && at < in[8].len; at++) fits = of.kind[at] < KINDS;
  for (size_t at = 0; fits && at < stretches.count; at++) fits = of.reason[at] >= 0 && of.reason[at] < in[8].len;
  if (!fits) return failed("columns of other lengths, or a row, an event or a reason beyond the last", in, 11);
  of.kept = malloc((stretches.count / BLOCK + 1) * sizeof *of.kept);
  if (of.kept == NULL) return failed(NULL, in, 11);
  Py_BEGIN_ALLOW_THREADS;
  Kept so_far = {{0}, 0};
  for (size_t at = 0; at < stretches.count; at++) {
    if (at % BLOCK == 0) of.kept[at / BLOCK] = so_far;
    so_far.before[of.kind[of.reason[at]]] += stretches.end[at] - stretches.start[at];
  }
  for (size_t at = 0, from = 0, to = 0; stretches.count > 0 && at < rows; at++) {
    int64_t often = counted[event[row[at]]];
    from = add_until(&of, start[row[at]], often, -1, ns + at, rows, to);
    to = add_until(&of, end[row[at]], often, 1, ns + at, rows, from);
  }
  int64_t under_way = 0;
  for (size_t block = 0; block * BLOCK < stretches.count; block++)
    if ((under_way += of.kept[block].over) != 0)
      for (size_t at = block * BLOCK; at < stretches.count && at < (block + 1) * BLOCK; at++)
        of.by_reason[of.reason[at]] += under_way * (stretches.end[at] - stretches.start[at]);
  Py_END_ALLOW_THREADS;
  free(of.kept);
  release(in, 11);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"sweep", (PyCFunction)(void (*)(void))sweep, METH_FASTCALL, "Who owns which stretch."},
    {"meet", (PyCFunction)(void (*)(void))meetings, METH_FASTCALL, "Where intervals and stretches meet."},
    {"kept", (PyCFunction)(void (*)(void))kept, METH_FASTCALL, "What kept a thread in intervals."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_intervals", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__intervals(void) { return PyModule_Create(&module); }
