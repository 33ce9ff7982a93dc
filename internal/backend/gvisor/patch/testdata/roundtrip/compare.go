package main

import (
	"fmt"
	"reflect"
)

type place struct {
	p uintptr
	t reflect.Type
}

type comparison struct {
	ab, ba map[place]uintptr
	keep   []any
}

func (c *comparison) fail(path string, f string, v ...any) {
	panic(path + ": " + fmt.Sprintf(f, v...))
}

// same compares addressable (or not) values; it records where they are.
func (c *comparison) same(path string, a, b reflect.Value) {
	if a.Type() != b.Type() {
		c.fail(path, "types %v %v", a.Type(), b.Type())
	}
	if a.CanAddr() && a.Type().Size() != 0 {
		pa, pb := a.UnsafeAddr(), b.UnsafeAddr()
		ka, kb := place{pa, a.Type()}, place{pb, a.Type()}
		qa, oka := c.ab[ka]
		qb, okb := c.ba[kb]
		if oka != okb || oka && (qa != pb || qb != pa) {
			c.fail(path, "aliasing differs for %v", a.Type())
		}
		if oka {
			return
		}
		c.ab[ka], c.ba[kb] = pb, pa
	}
	switch a.Kind() {
	case reflect.Struct:
		for i := 0; i < a.NumField(); i++ {
			c.same(path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))
		}
	case reflect.Array:
		for i := 0; i < a.Len(); i++ {
			c.same(path+"[]", a.Index(i), b.Index(i))
		}
	case reflect.Ptr:
		if a.IsNil() != b.IsNil() {
			c.fail(path, "nil %v %v", a.IsNil(), b.IsNil())
		}
		if !a.IsNil() {
			c.same(path+"*", a.Elem(), b.Elem())
		}
	case reflect.Slice:
		if a.IsNil() != b.IsNil() || a.Len() != b.Len() || a.Cap() != b.Cap() {
			c.fail(path, "slice %d/%d %d/%d", a.Len(), a.Cap(), b.Len(), b.Cap())
		}
		for i := 0; i < a.Cap(); i++ {
			c.same(path+"[]", a.Slice(0, a.Cap()).Index(i), b.Slice(0, b.Cap()).Index(i))
		}
	case reflect.Interface:
		if a.IsNil() != b.IsNil() {
			c.fail(path, "nil interface")
		}
		if !a.IsNil() {
			c.same(path+"()", a.Elem(), b.Elem())
		}
	case reflect.Map:
		if a.IsNil() != b.IsNil() || a.Len() != b.Len() {
			c.fail(path, "map %d %d", a.Len(), b.Len())
		}
		if a.IsNil() {
			return
		}
		ka, kb := place{a.Pointer(), a.Type()}, place{b.Pointer(), a.Type()}
		qa, oka := c.ab[ka]
		qb, okb := c.ba[kb]
		if oka != okb || oka && (qa != kb.p || qb != ka.p) {
			c.fail(path, "map aliasing")
		}
		if oka {
			return
		}
		c.ab[ka], c.ba[kb] = kb.p, ka.p
		for _, k := range a.MapKeys() {
			w := b.MapIndex(k)
			if !w.IsValid() {
				c.fail(path, "no key %v", k)
			}
			c.same(path+"[k]", a.MapIndex(k), w)
		}
	case reflect.String:
		if a.String() != b.String() {
			c.fail(path, "%q %q", a.String(), b.String())
		}
	case reflect.Float64:
		if a.Float() != b.Float() {
			c.fail(path, "float")
		}
	case reflect.Bool:
		if a.Bool() != b.Bool() {
			c.fail(path, "bool")
		}
	default:
		if a.CanInt() && a.Int() != b.Int() || a.CanUint() && a.Uint() != b.Uint() {
			c.fail(path, "%v %v", a, b)
		}
		if !a.CanInt() && !a.CanUint() {
			c.fail(path, "kind %v", a.Kind())
		}
	}
}
