package proc

// manyPieces is how many pieces of input a process is known to have had.
const manyPieces = 1024

// pieces knows how much was written of the latest pieces of input, by their
// names. The zero value knows none.
type pieces struct {
	written map[string]int // in bytes
	names   []string       // oldest first
}

// had returns how much of a piece was written before.
func (p *pieces) had(name string) int { return p.written[name] }

// note keeps how much of a piece is written by now. One without a name is not
// known again.
func (p *pieces) note(name string, written int) {
	if name == "" {
		return
	}
	if p.written == nil {
		p.written = map[string]int{}
	}
	if _, known := p.written[name]; !known {
		if len(p.names) == manyPieces {
			delete(p.written, p.names[0])
			p.names = p.names[1:]
		}
		p.names = append(p.names, name)
	}
	p.written[name] = written
}
