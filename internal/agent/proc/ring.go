package proc

// Retention of output. A ring grows with what is written, so a process that
// writes little holds little.
const (
	ringMin = 1 << 10
	ringMax = 1 << 20 // bytes of each stream that stay readable
)

// ring holds the last bytes of a stream by their position since its start.
type ring struct {
	buf  []byte // its length is a power of two, 0 before the first write
	head int64  // position after the last byte written
	tail int64  // position of the oldest byte held
}

// write appends p and drops the oldest bytes beyond ringMax. len(p) is at
// most ringMax.
func (r *ring) write(p []byte) {
	r.grow(int(r.head-r.tail) + len(p))
	r.head += int64(len(p))
	r.tail = max(r.tail, r.head-int64(len(r.buf)))
	at := int(r.head-int64(len(p))) & (len(r.buf) - 1)
	n := copy(r.buf[at:], p)
	copy(r.buf, p[n:])
}

func (r *ring) grow(need int) {
	size := max(len(r.buf), ringMin)
	for size < need && size < ringMax {
		size *= 2
	}
	if size == len(r.buf) {
		return
	}
	old := *r
	r.buf = make([]byte, size)
	for pos := old.tail; pos < old.head; {
		at := int(pos) & (len(old.buf) - 1)
		run := min(len(old.buf)-at, int(old.head-pos))
		to := int(pos) & (size - 1)
		pos += int64(copy(r.buf[to:], old.buf[at:at+run]))
	}
}

// read copies bytes from position pos, which must not lie before tail, and
// returns how many there were.
func (r *ring) read(dst []byte, pos int64) int {
	if pos >= r.head {
		return 0
	}
	dst = dst[:min(int64(len(dst)), r.head-pos)]
	at := int(pos) & (len(r.buf) - 1)
	n := copy(dst, r.buf[at:])
	return n + copy(dst[n:], r.buf)
}

// drop forgets all that is held.
func (r *ring) drop() { r.buf, r.tail = nil, r.head }
