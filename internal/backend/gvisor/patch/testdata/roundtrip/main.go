// Command roundtrip saves random graphs of objects with gVisor's package state and
// loads them again, and compares what is in them and what points where. Arguments:
// the first seed, how many, and about how many nodes a graph has.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"os"
	"reflect"
	"strconv"
	"unsafe"

	"gvisor.dev/gvisor/pkg/compressio"
	"gvisor.dev/gvisor/pkg/state"
)

// window is a reader with windows of random sizes.
type window struct {
	*rand.Rand
	b   []byte
	pos int
	cur int
	off bool
}

func (w *window) Read(p []byte) (int, error) {
	if w.pos == len(w.b) {
		return 0, io.EOF
	}
	if len(p) == 0 {
		return 0, nil
	}
	n := copy(p[:1+w.Intn(len(p))], w.b[w.pos:])
	w.pos += n
	return n, nil
}

func (w *window) Window() ([]byte, error) {
	if w.pos == len(w.b) {
		return nil, io.EOF
	}
	n := 1 + w.Intn(min(len(w.b)-w.pos, 1+w.Intn(200)))
	w.cur = n
	return bytes.Clone(w.b[w.pos : w.pos+n]), nil
}

func (w *window) Consume(n int) {
	if n > w.cur {
		panic("consumed too much")
	}
	w.cur = 0
	w.pos += n
}

// keyed returns a reader of b with checksums, which has no window.
func keyed(b []byte) io.Reader {
	var out bytes.Buffer
	w := compressio.NewSimpleWriter(&out, []byte("key"), 1000)
	if _, err := w.Write(b); err != nil {
		panic(err)
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return compressio.NewSimpleReader(nopCloser{&out}, []byte("key"))
}

type nopCloser struct{ io.Reader }

func (nopCloser) Close() error { return nil }

func once(seed int64, n int) (err any) {
	defer func() { err = recover() }()
	g := &gen{Rand: rand.New(rand.NewSource(seed))}
	r1, r2 := g.graph(n), (&gen{Rand: g.Rand}).graph(3)
	saves = map[unsafe.Pointer]map[string]int{}
	var buf bytes.Buffer
	if _, err := state.Save(context.Background(), &buf, r1); err != nil {
		panic(fmt.Sprintf("save: %v", err))
	}
	for p, m := range saves {
		for t, k := range m {
			if k > 1 {
				// Temporary copies may have the same address after a collection.
				found := false
				for _, x := range g.leaves {
					found = found || unsafe.Pointer(x) == p
				}
				if found {
					panic(fmt.Sprintf("%s saved %d times", t, k))
				}
			}
		}
	}
	first := buf.Len()
	buf.WriteString("between")
	if _, err := state.Save(context.Background(), &buf, r2); err != nil {
		panic(fmt.Sprintf("save 2: %v", err))
	}
	buf.WriteString("end")
	readers := []io.Reader{
		bytes.NewReader(buf.Bytes()),
		&window{Rand: g.Rand, b: buf.Bytes()},
		compressio.NewSimpleReader(nopCloser{bytes.NewReader(buf.Bytes())}, nil),
		keyed(buf.Bytes()),
	}
	for i, r := range readers {
		loads = map[unsafe.Pointer]map[string]int{}
		l1, l2 := new(Root), new(Root)
		if _, err := state.Load(context.Background(), r, l1); err != nil {
			panic(fmt.Sprintf("reader %d: load: %v", i, err))
		}
		mid := make([]byte, 7)
		if _, err := io.ReadFull(r, mid); err != nil || string(mid) != "between" {
			panic(fmt.Sprintf("reader %d: %q %v", i, mid, err))
		}
		c := &comparison{ab: map[place]uintptr{}, ba: map[place]uintptr{}}
		c.same("root", reflect.ValueOf(r1).Elem(), reflect.ValueOf(l1).Elem())
		for p, m := range loads {
			for t, k := range m {
				if _, ok := c.ba[place{uintptr(p), map[string]reflect.Type{"Leaf": reflect.TypeFor[Leaf](), "Node": reflect.TypeFor[Node]()}[t]}]; ok && k != 1 {
					panic(fmt.Sprintf("%s after load %d times", t, k))
				}
			}
		}
		if _, err := state.Load(context.Background(), r, l2); err != nil {
			panic(fmt.Sprintf("reader %d: load 2: %v", i, err))
		}
		c = &comparison{ab: map[place]uintptr{}, ba: map[place]uintptr{}}
		c.same("root2", reflect.ValueOf(r2).Elem(), reflect.ValueOf(l2).Elem())
		rest, _ := io.ReadAll(r)
		if string(rest) != "end" {
			panic(fmt.Sprintf("reader %d: rest %d bytes", i, len(rest)))
		}
	}
	// Cut short anywhere, a load must fail and not hang.
	cut := g.Intn(buf.Len() / 3)
	for _, r := range []io.Reader{bytes.NewReader(buf.Bytes()[:cut]), compressio.NewSimpleReader(nopCloser{bytes.NewReader(buf.Bytes()[:cut])}, nil)} {
		_, err := state.Load(context.Background(), r, new(Root))
		if err == nil && cut < first {
			panic("a cut stream was loaded")
		}
	}
	return nil
}

func main() {
	first, err := strconv.ParseInt(os.Args[1], 10, 64)
	count, err2 := strconv.ParseInt(os.Args[2], 10, 64)
	nodes, err3 := strconv.Atoi(os.Args[3])
	if err := errors.Join(err, err2, err3); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	for seed := first; seed < first+count; seed++ {
		if wrong := once(seed, nodes); wrong != nil {
			fmt.Fprintf(os.Stderr, "seed %d: %.1500s\n", seed, fmt.Sprint(wrong))
			os.Exit(1)
		}
	}
}
