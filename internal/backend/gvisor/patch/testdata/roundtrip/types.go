package main

import (
	"context"
	"reflect"
	"strconv"
	"unsafe"

	"gvisor.dev/gvisor/pkg/atomicbitops"
	"gvisor.dev/gvisor/pkg/state"
	"gvisor.dev/gvisor/pkg/waiter"
)

var saves map[unsafe.Pointer]map[string]int
var loads map[unsafe.Pointer]map[string]int

func count(m map[unsafe.Pointer]map[string]int, p unsafe.Pointer, t string) {
	if m[p] == nil {
		m[p] = map[string]int{}
	}
	m[p][t]++
}

type Empty struct{}

func (*Empty) StateTypeName() string                   { return "rt.Empty" }
func (*Empty) StateFields() []string                   { return nil }
func (*Empty) StateSave(state.Sink)                    {}
func (*Empty) StateLoad(context.Context, state.Source) {}

type Key struct {
	A uint8
	B [4]byte
	C string
}

func (*Key) StateTypeName() string { return "rt.Key" }
func (*Key) StateFields() []string { return []string{"A", "B", "C"} }
func (k *Key) StateSave(m state.Sink) {
	m.Save(0, &k.A)
	m.Save(1, &k.B)
	m.Save(2, &k.C)
}
func (k *Key) StateLoad(_ context.Context, m state.Source) {
	m.Load(0, &k.A)
	m.Load(1, &k.B)
	m.Load(2, &k.C)
}

// Wrap has the same size and place as its only field.
type Wrap struct{ L Leaf }

func (*Wrap) StateTypeName() string { return "rt.Wrap" }
func (*Wrap) StateFields() []string { return []string{"L"} }
func (w *Wrap) StateSave(m state.Sink) {
	count(saves, unsafe.Pointer(w), "Wrap")
	m.Save(0, &w.L)
}
func (w *Wrap) StateLoad(_ context.Context, m state.Source) { m.Load(0, &w.L) }

type Leaf struct {
	A       int64
	B       [8]byte
	C       [3]uint16
	Z       atomicbitops.Uint64
	S       string
	E       Empty
	D       *int64
	BB      [2][3]byte
	derived *Key  // saved as a fresh copy
	dv      int64 // saved as a string
	U       uint8
}

func (*Leaf) StateTypeName() string { return "rt.Leaf" }
func (*Leaf) StateFields() []string {
	return []string{"A", "B", "C", "Z", "S", "E", "D", "BB", "derived", "U", "dv"}
}
func (l *Leaf) StateSave(m state.Sink) {
	count(saves, unsafe.Pointer(l), "Leaf")
	m.SaveValue(8, func() *Key {
		if l.derived == nil {
			return nil
		}
		k := *l.derived
		return &k
	}())
	m.SaveValue(10, strconv.FormatInt(l.dv, 10))
	m.Save(0, &l.A)
	m.Save(1, &l.B)
	m.Save(2, &l.C)
	m.Save(3, &l.Z)
	m.Save(4, &l.S)
	m.Save(5, &l.E)
	m.Save(6, &l.D)
	m.Save(7, &l.BB)
	m.Save(9, &l.U)
}
func (l *Leaf) StateLoad(_ context.Context, m state.Source) {
	m.Load(0, &l.A)
	m.Load(1, &l.B)
	m.Load(2, &l.C)
	m.Load(3, &l.Z)
	m.Load(4, &l.S)
	m.Load(5, &l.E)
	m.Load(6, &l.D)
	m.Load(7, &l.BB)
	m.Load(8, &l.derived)
	m.LoadValue(10, new(string), func(y any) { l.dv, _ = strconv.ParseInt(y.(string), 10, 64) })
	m.Load(9, &l.U)
	m.AfterLoad(func() { count(loads, unsafe.Pointer(l), "Leaf") })
}

type Inner struct {
	X  int32
	P  *Leaf
	L  Leaf
	W  [1]Wrap
	AZ [3]atomicbitops.Bool
}

func (*Inner) StateTypeName() string { return "rt.Inner" }
func (*Inner) StateFields() []string { return []string{"X", "P", "L", "W", "AZ"} }
func (i *Inner) StateSave(m state.Sink) {
	count(saves, unsafe.Pointer(i), "Inner")
	m.Save(0, &i.X)
	m.Save(1, &i.P)
	m.Save(2, &i.L)
	m.Save(3, &i.W)
	m.Save(4, &i.AZ)
}
func (i *Inner) StateLoad(_ context.Context, m state.Source) {
	m.Load(4, &i.AZ)
	m.Load(0, &i.X)
	m.Load(1, &i.P)
	m.Load(2, &i.L)
	m.Load(3, &i.W)
}

type Iface interface{ Is() }

func (*Leaf) Is() {}
func (Key) Is()   {}
func (*Wrap) Is() {}

type Node struct {
	Inner
	Q      waiter.Queue
	Arr    [3]Leaf
	One    [1]Inner
	Two    [2][2]Leaf
	Z32    atomicbitops.Uint32
	ZB     atomicbitops.Bool
	Z64    atomicbitops.Int64
	Nodes  []*Node
	PInt   *int64
	PByte  *byte
	PBytes *[8]byte
	PArr   *[3]Leaf
	PRow   *[2]Leaf
	PInner *Inner
	PLeaf  *Leaf
	PLeaf2 *Leaf
	PWrap  *Wrap
	PZ     *atomicbitops.Uint64
	PZB    *atomicbitops.Bool
	PQ     *waiter.Queue
	Sl     []Leaf
	SlA    []Leaf // of an array field
	SlI    []Inner
	Bs     []byte
	M      map[string]Leaf
	MP     map[int64]*Leaf
	MK     map[Key][4]byte
	MI     map[string]any
	I      any
	If     Iface
	PI     *any
	PP     **Leaf
	F      float64
	V      Wrap // by SaveValue
	PE     *Empty
	Str    string
	APtr   [3]*Leaf
	AI     [2]any
	AS     [2][]Leaf
	AM     [2]map[string]Leaf
	PM     *map[string]Leaf
}

func nodeFields(n *Node) (names []string, ptrs []any) {
	v := reflect.ValueOf(n).Elem()
	for i := 0; i < v.NumField(); i++ {
		names = append(names, v.Type().Field(i).Name)
		ptrs = append(ptrs, v.Field(i).Addr().Interface())
	}
	return
}

func (*Node) StateTypeName() string   { return "rt.Node" }
func (n *Node) StateFields() []string { f, _ := nodeFields(n2); return f }

var n2 = new(Node)

func (n *Node) StateSave(m state.Sink) {
	count(saves, unsafe.Pointer(n), "Node")
	names, p := nodeFields(n)
	for i := range p {
		if names[i] == "V" {
			m.SaveValue(i, n.V)
			continue
		}
		m.Save(i, p[i])
	}
}
func (n *Node) StateLoad(_ context.Context, m state.Source) {
	names, p := nodeFields(n)
	for i := range p {
		if names[i] == "V" {
			m.LoadValue(i, new(Wrap), func(y any) { n.V = y.(Wrap) })
			continue
		}
		m.Load(i, p[i])
	}
	m.AfterLoad(func() { count(loads, unsafe.Pointer(n), "Node") })
}

type Root struct {
	First []any
	Nodes []*Node
}

func (*Root) StateTypeName() string { return "rt.Root" }
func (*Root) StateFields() []string { return []string{"First", "Nodes"} }
func (r *Root) StateSave(m state.Sink) {
	m.Save(0, &r.First)
	m.Save(1, &r.Nodes)
}
func (r *Root) StateLoad(_ context.Context, m state.Source) {
	m.Load(0, &r.First)
	m.Load(1, &r.Nodes)
}

func init() {
	state.Register((*Empty)(nil))
	state.Register((*Key)(nil))
	state.Register((*Wrap)(nil))
	state.Register((*Leaf)(nil))
	state.Register((*Inner)(nil))
	state.Register((*Node)(nil))
	state.Register((*Root)(nil))
}
