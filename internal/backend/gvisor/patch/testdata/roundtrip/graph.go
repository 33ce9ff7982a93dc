package main

import (
	"math"
	"math/rand"

	"gvisor.dev/gvisor/pkg/atomicbitops"
)

type gen struct {
	*rand.Rand
	nodes  []*Node
	leaves []*Leaf // all that can be pointed to
	solo   []*Leaf // no parts of nodes: what waits for them waits for no more
	inners []*Inner
	slices [][]Leaf
	bytes  [][]byte
	maps   []map[string]Leaf
	mps    []map[int64]*Leaf
}

func (g *gen) p(x float64) bool { return g.Float64() < x }
func pick[T any](g *gen, s []T) (t T) {
	if len(s) == 0 || g.p(0.15) {
		return
	}
	return s[g.Intn(len(s))]
}

func (g *gen) str() string {
	n := g.Intn(12)
	if g.p(0.002) {
		n = 64<<10 - 2 + g.Intn(5)
	} else if g.p(0.001) {
		n = 300 << 10
	}
	b := make([]byte, n)
	g.Read(b)
	return string(b)
}

func (g *gen) int() int64 {
	switch g.Intn(4) {
	case 0:
		return 0
	case 1:
		return int64(g.Intn(100)) - 50
	case 2:
		return []int64{math.MaxInt64, math.MinInt64, -1, 127, 128, -128}[g.Intn(6)]
	}
	return int64(g.Uint64())
}

// leafValue fills what is no pointer.
func (g *gen) leafValue() (l Leaf) {
	if g.p(0.3) {
		return
	}
	l.A = g.int()
	if g.p(0.5) {
		g.Read(l.B[:])
	}
	if g.p(0.5) {
		l.C[g.Intn(3)] = uint16(g.Uint32())
	}
	if g.p(0.4) {
		l.Z = atomicbitops.FromUint64(g.Uint64())
	}
	if g.p(0.3) {
		l.BB[1][g.Intn(3)] = byte(g.Uint32())
	}
	l.U = uint8(g.Intn(3))
	l.S = g.str()
	if g.p(0.3) {
		l.derived = &Key{C: g.str(), A: uint8(g.Intn(2))}
		l.dv = g.int()
	}
	return
}

func (g *gen) addInner(i *Inner) {
	i.X = int32(g.int())
	i.L = g.leafValue()
	i.W[0].L = g.leafValue()
	if g.p(0.3) {
		i.AZ[1] = atomicbitops.FromBool(true)
	}
	g.inners = append(g.inners, i)
	g.leaves = append(g.leaves, &i.L, &i.W[0].L)
}

func (g *gen) anyOf() any {
	switch g.Intn(16) {
	case 0:
		return nil
	case 1:
		return g.leafValue()
	case 2:
		return pick(g, g.leaves)
	case 3:
		return [4]byte{0, byte(g.Intn(2)), 0, 3}
	case 4:
		return g.int()
	case 5:
		return pick(g, g.slices)
	case 6:
		return Key{C: g.str()}
	case 7:
		return [2]Leaf{g.leafValue(), g.leafValue()}
	case 8:
		return pick(g, g.maps)
	case 9:
		if n := pick(g, g.nodes); n != nil {
			return &n.Z32
		}
	case 10:
		if n := pick(g, g.nodes); n != nil {
			return &n.Arr
		}
	case 11:
		return pick(g, g.bytes)
	case 12:
		return pick(g, g.nodes)
	case 13:
		return atomicbitops.FromUint64(uint64(g.Intn(2)))
	case 14:
		if n := pick(g, g.nodes); n != nil {
			return &n.I
		}
	case 15:
		if n := pick(g, g.nodes); n != nil {
			return &n.Two[g.Intn(2)]
		}
	}
	return Empty{}
}

func (g *gen) graph(n int) *Root {
	for range n {
		x := new(Node)
		g.nodes = append(g.nodes, x)
		g.addInner(&x.Inner)
		g.addInner(&x.One[0])
		for i := range x.Arr {
			x.Arr[i] = g.leafValue()
			g.leaves = append(g.leaves, &x.Arr[i])
		}
		for i := range 4 {
			x.Two[i/2][i%2] = g.leafValue()
			g.leaves = append(g.leaves, &x.Two[i/2][i%2])
		}
	}
	for range n {
		s := make([]Leaf, g.Intn(4), 5)
		for i := range s {
			s[i] = g.leafValue()
			g.leaves = append(g.leaves, &s[i])
			g.solo = append(g.solo, &s[i])
		}
		g.slices = append(g.slices, s)
		w := new(Wrap)
		w.L = g.leafValue()
		g.leaves = append(g.leaves, &w.L)
		b := make([]byte, g.Intn(20), 20)
		if g.p(0.5) {
			g.Read(b)
		}
		g.bytes = append(g.bytes, b)
		l := g.leafValue()
		g.leaves = append(g.leaves, &l)
		g.solo = append(g.solo, &w.L, &l)
		g.maps = append(g.maps, map[string]Leaf{})
		g.mps = append(g.mps, map[int64]*Leaf{})
	}
	for _, m := range g.maps {
		for range g.Intn(4) {
			l := g.leafValue()
			if x := pick(g, g.leaves); x != nil {
				l.D = &x.A
			}
			m[g.str()] = l
		}
	}
	for _, m := range g.mps {
		for range g.Intn(4) {
			m[g.int()] = pick(g, g.leaves)
		}
	}
	for _, l := range g.leaves {
		if g.p(0.3) {
			if x := pick(g, g.leaves); x != nil {
				l.D = &x.A
			}
		}
	}
	for _, i := range g.inners {
		if g.p(0.5) {
			i.P = pick(g, g.leaves)
		}
	}
	for _, x := range g.nodes {
		if g.p(0.5) {
			x.Z32 = atomicbitops.FromUint32(g.Uint32())
		}
		if g.p(0.5) {
			x.ZB = atomicbitops.FromBool(true)
		}
		if g.p(0.5) {
			x.Z64 = atomicbitops.FromInt64(g.int())
		}
		for range g.Intn(3) {
			x.Nodes = append(x.Nodes, pick(g, g.nodes))
		}
		if l := pick(g, g.leaves); l != nil && g.p(0.7) {
			x.PInt = &l.A
		}
		if l := pick(g, g.leaves); l != nil && g.p(0.5) {
			x.PByte = &l.B[g.Intn(8)]
		}
		if l := pick(g, g.leaves); l != nil && g.p(0.5) {
			x.PBytes = &l.B
		}
		if l := pick(g, g.leaves); l != nil && g.p(0.5) {
			x.PZ = &l.Z
		}
		if y := pick(g, g.nodes); y != nil && g.p(0.5) {
			x.PArr = &y.Arr
		}
		if y := pick(g, g.nodes); y != nil && g.p(0.5) {
			x.PRow = &y.Two[g.Intn(2)]
		}
		if y := pick(g, g.nodes); y != nil && g.p(0.5) {
			x.SlA = y.Arr[:g.Intn(3)]
		}
		if y := pick(g, g.nodes); y != nil && g.p(0.5) {
			x.PZB = &y.ZB
		}
		if y := pick(g, g.nodes); y != nil && g.p(0.5) {
			x.PQ = &y.Q
		}
		if y := pick(g, g.nodes); y != nil && g.p(0.5) {
			// not y.One[:], which is as large as its element: no codec can do that
			x.SlI = []Inner{{X: y.X}, {P: pick(g, g.leaves)}}
		}
		x.PInner = pick(g, g.inners)
		x.PLeaf = pick(g, g.leaves)
		x.PLeaf2 = pick(g, g.leaves)
		if i := pick(g, g.inners); i != nil && g.p(0.5) {
			x.PWrap = &i.W[0]
		}
		if i := pick(g, g.inners); i != nil && g.p(0.5) {
			x.PP = &i.P
		}
		x.Sl = pick(g, g.slices)
		x.Bs = pick(g, g.bytes)
		x.M = pick(g, g.maps)
		x.MP = pick(g, g.mps)
		if g.p(0.5) {
			x.MK = map[Key][4]byte{}
			for range g.Intn(3) {
				x.MK[Key{A: uint8(g.Intn(2)), C: g.str()}] = [4]byte{byte(g.Intn(2))}
			}
		}
		if g.p(0.5) {
			x.MI = map[string]any{}
			for range g.Intn(4) {
				x.MI[g.str()] = g.anyOf()
			}
		}
		x.I = g.anyOf()
		switch g.Intn(4) {
		case 0:
			x.If = Key{C: g.str()}
		case 1:
			if l := pick(g, g.leaves); l != nil {
				x.If = l
			}
		case 2:
			if i := pick(g, g.inners); i != nil {
				x.If = &i.W[0]
			}
		}
		if y := pick(g, g.nodes); y != nil && g.p(0.5) {
			x.PI = &y.I
		}
		if y := pick(g, g.nodes); y != nil && g.p(0.5) {
			x.PM = &y.M
		}
		x.F = []float64{0, math.Inf(1), 1.5, math.SmallestNonzeroFloat64}[g.Intn(4)]
		if g.p(0.5) {
			x.V.L = g.leafValue()
		}
		if g.p(0.3) {
			x.PE = new(Empty)
		}
		x.Str = g.str()
		for i := range x.APtr {
			x.APtr[i] = pick(g, g.solo)
		}
		for i := range x.AI {
			x.AI[i] = []any{nil, g.leafValue(), pick(g, g.solo), [3]byte{1}, pick(g, g.slices), pick(g, g.maps), pick(g, g.bytes)}[g.Intn(7)]
			x.AS[i] = pick(g, g.slices)
			x.AM[i] = pick(g, g.maps)
		}
	}
	r := &Root{}
	for range g.Intn(2 * n) {
		r.First = append(r.First, g.anyOf())
	}
	perm := g.Perm(n)
	for _, i := range perm {
		if g.p(0.6) {
			r.Nodes = append(r.Nodes, g.nodes[i])
		}
	}
	return r
}
